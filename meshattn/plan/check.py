"""Proof that a step list is right, by running it for all ranks on chunk numbers instead of tensors.

The checker shares nothing with the builder but the assignment matrix and the meaning of a step. It lets every
transfer arrive as early as possible (its receive slot changes hands at the start) and as late as possible
(its data may be read only after the wait), so what it accepts is right for any timing between the two.

What the list says by itself, in local numbers, is the part of ``check_list``; what the ranks hold by it, and
send to each other, that of ``check_ranks``.
"""

from __future__ import annotations

from collections.abc import Sequence

from .check_list import ListCheck
from .check_ranks import RankCheck
from .hops import RINGS, Hops, Paths, Reach, Visibility
from .schedule import Schedule


def check(
    schedule: Schedule,
    visibility: Visibility | None = None,
    hops: Sequence[Hops] | None = None,
    paths: Paths = RINGS,
) -> None:
    """Prove a list for every rank of its tile; AssertionError that says what is wrong, and in which step.

    ``visibility`` says which blocks have anything to compute (by default all), ``hops`` which hops each rank
    takes part in (by default those of ``hops_of``), ``paths`` how it moves things.

    Each block once and by its owner; sends and receives match pairwise on all ranks; nothing is read before
    it was waited for; no slot is overwritten while it is read, sent or still needed, also on the receiver's
    side; every row and, backward, every column ends complete on its owner with each contribution once; each
    transfer is waited for once; the slots are those of ``Slots.of``. Empty blocks are not run and contribute
    nothing; a hop takes place if and only if it carries something that is used.
    """
    visibility = visibility or Visibility.full(schedule.tile.ranks)
    if hops is None:
        reach = Reach(schedule.tile, visibility)
        hops = [reach.hops(rank, paths) for rank in range(schedule.tile.ranks)]
    listed = ListCheck(schedule)
    ranks = RankCheck(listed, visibility, hops, paths)
    for number, step in enumerate(schedule.steps):
        listed.begin(number, step)
        for transfer_number in step.waits:
            ranks.wait(listed.wait(transfer_number))
        for merge in step.merges:
            ranks.merge(listed.merge(merge), merge)
        for transfer in step.transfers:
            listed.start(transfer)
            ranks.start(transfer)
        for block in step.blocks:
            ranks.block(block, whole=listed.block(block))
    listed.finish()
    ranks.finish()
