"""The checker: each way to spoil a list is found, in every tile where it can be done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from meshattn.plan import Block, Direction, Merge, Schedule, Step, Tile, Transfer, build, check
from plan_cases import costs

TILES = [Tile(1, 5), Tile(5, 1), Tile(2, 2), Tile(2, 3), Tile(4, 3)]
# A mutant takes a list and gives all its spoilt versions; none where the list has nothing of the kind.
Mutants = Callable[[Schedule], Iterator[Schedule]]


def with_step(schedule: Schedule, number: int, **parts: object) -> Schedule:
    steps = list(schedule.steps)
    steps[number] = replace(steps[number], **parts)
    return replace(schedule, steps=tuple(steps))


def spoil_transfers(
    schedule: Schedule, pick: Callable[[Transfer], bool], spoil: Callable[[Transfer], Transfer]
) -> Iterator[Schedule]:
    """All lists with one picked transfer spoilt."""
    for number, step in enumerate(schedule.steps):
        for i, t in enumerate(step.transfers):
            if pick(t) and spoil(t) != t:
                yield with_step(
                    schedule, number, transfers=(*step.transfers[:i], spoil(t), *step.transfers[i + 1 :])
                )


def spoil_blocks(schedule: Schedule, spoil: Callable[[Block], tuple[Block, ...]]) -> Iterator[Schedule]:
    for number, step in enumerate(schedule.steps):
        for i, block in enumerate(step.blocks):
            yield with_step(schedule, number, blocks=(*step.blocks[:i], *spoil(block), *step.blocks[i + 1 :]))


def spoil_merges(schedule: Schedule, spoil: Callable[[Merge], tuple[Merge, ...]]) -> Iterator[Schedule]:
    for number, step in enumerate(schedule.steps):
        for i, merge in enumerate(step.merges):
            yield with_step(schedule, number, merges=(*step.merges[:i], *spoil(merge), *step.merges[i + 1 :]))


def ring_swapped(schedule: Schedule) -> Iterator[Schedule]:
    # On a ring of two, left and right are the same rank.
    long = {axis for axis in ("row", "col") if schedule.tile.size(axis) > 2}
    yield from spoil_transfers(schedule, lambda t: t.axis in long, lambda t: replace(t, offset=1))


def all_rings_swapped(schedule: Schedule) -> Iterator[Schedule]:
    if max(schedule.tile.a, schedule.tile.b) > 2:
        steps = tuple(
            replace(s, transfers=tuple(replace(t, offset=1) for t in s.transfers)) for s in schedule.steps
        )
        yield replace(schedule, steps=steps)


def merge_dropped(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_merges(schedule, lambda merge: ())


def merge_doubled(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_merges(schedule, lambda merge: (merge, merge))


def merge_into_wrong_line(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_merges(schedule, lambda merge: (replace(merge, index=merge.index + 1),))


def merge_from_wrong_slot(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_merges(schedule, lambda merge: (replace(merge, recv_slot=merge.recv_slot + 1),))


def last_hop_dropped(schedule: Schedule) -> Iterator[Schedule]:
    """One hop short, with its wait and its merge gone too: a list that is consistent but does too little."""
    for payload in ("q", "kv", "out", "bundle", "dq", "dkv"):
        mine = [t for t in schedule.transfers if t.payload == payload]
        if mine:
            yield without(schedule, mine[-1])


def without(schedule: Schedule, gone: Transfer) -> Schedule:
    def number(n: int) -> int:
        return n - (n > gone.number)

    def step(s: Step) -> Step:
        return Step(
            waits=tuple(number(n) for n in s.waits if n != gone.number),
            merges=tuple(
                replace(m, transfer=number(m.transfer)) for m in s.merges if m.transfer != gone.number
            ),
            transfers=tuple(
                replace(t, number=number(t.number)) for t in s.transfers if t.number != gone.number
            ),
            blocks=s.blocks,
        )

    return replace(schedule, steps=tuple(map(step, schedule.steps)))


def wait_missing(schedule: Schedule) -> Iterator[Schedule]:
    for number, step in enumerate(schedule.steps):
        for n in step.waits:
            yield with_step(schedule, number, waits=tuple(other for other in step.waits if other != n))


def wait_doubled(schedule: Schedule) -> Iterator[Schedule]:
    for number, step in enumerate(schedule.steps):
        if step.waits:
            yield with_step(schedule, number, waits=(*step.waits, step.waits[0]))


def wait_too_late(schedule: Schedule) -> Iterator[Schedule]:
    """The wait moves to the end, so that something uses what may not have arrived."""
    end = Step(waits=(), merges=(), transfers=(), blocks=())
    longer = replace(schedule, steps=(*schedule.steps, end))
    for number, step in enumerate(schedule.steps):
        for n in step.waits:
            late = with_step(longer, number, waits=tuple(other for other in step.waits if other != n))
            yield with_step(late, len(schedule.steps), waits=(n,))


def block_doubled(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_blocks(schedule, lambda block: (block, block))


def block_dropped(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_blocks(schedule, lambda block: ())


def block_in_wrong_slot(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_blocks(schedule, lambda block: (replace(block, row_slot=block.row_slot + 1),))
    yield from spoil_blocks(schedule, lambda block: (replace(block, col_slot=block.col_slot + 1),))


def block_in_wrong_accumulator(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_blocks(schedule, lambda block: (replace(block, row_acc=block.row_acc + 1),))
    yield from spoil_blocks(schedule, lambda block: (replace(block, col_acc=block.col_acc + 1),))


def blocks_before_their_chunks(schedule: Schedule) -> Iterator[Schedule]:
    """All blocks of a later step run in the first one."""
    first = schedule.steps[0]
    for number, step in enumerate(schedule.steps):
        if number and any(block.row or block.col for block in step.blocks):
            early = with_step(schedule, number, blocks=())
            yield with_step(early, 0, blocks=(*first.blocks, *step.blocks))


def sent_before_complete(schedule: Schedule) -> Iterator[Schedule]:
    """The last block of a line moves behind the send of that line."""
    for number, step in enumerate(schedule.steps):
        for t in step.transfers:
            if not t.inward:
                lines = [
                    (s, block)
                    for s, earlier in enumerate(schedule.steps[:number])
                    for block in earlier.blocks
                    if (block.row if t.axis == "row" else block.col) == t.sent
                ]
                where, block = lines[-1]
                kept = tuple(b for b in schedule.steps[where].blocks if b != block)
                moved = with_step(schedule, where, blocks=kept)
                yield with_step(moved, number, blocks=(*step.blocks, block))


def slot_reused_early(schedule: Schedule) -> Iterator[Schedule]:
    """A chunk lands where the one before it still lives, and everything that reads it looks there."""
    for t in schedule.transfers:
        if t.inward and t.index > 1:
            before = next(o for o in schedule.transfers if (o.payload, o.index) == (t.payload, t.index - 1))
            yield from spoil_transfers(
                schedule, lambda o, t=t: o == t, lambda o, slot=before.recv_slot: replace(o, recv_slot=slot)
            )


def own_chunk_overwritten(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(schedule, lambda t: t.inward, lambda t: replace(t, recv_slot=0))


def receive_slot_out_of_range(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(schedule, lambda t: True, lambda t: replace(t, recv_slot=t.recv_slot + 99))


def released_too_early(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(schedule, lambda t: True, lambda t: replace(t, last_use=t.last_use - 1))


def released_too_late(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(schedule, lambda t: True, lambda t: replace(t, last_use=t.last_use + 1))


def wrong_chunk_sent(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(
        schedule, lambda t: True, lambda t: replace(t, sent=(t.sent + 1) % schedule.tile.size(t.axis))
    )


def wrong_slot_sent(schedule: Schedule) -> Iterator[Schedule]:
    yield from spoil_transfers(schedule, lambda t: True, lambda t: replace(t, send_slot=t.send_slot + 1))


def two_hops_of_one_ring_in_a_step(schedule: Schedule) -> Iterator[Schedule]:
    for number, step in enumerate(schedule.steps):
        if step.transfers:
            yield with_step(schedule, number, transfers=(*step.transfers, step.transfers[-1]))


def other_slot_counts(schedule: Schedule) -> Iterator[Schedule]:
    yield replace(schedule, slots=replace(schedule.slots, row=schedule.slots.row + 1))


MUTANTS: list[Mutants] = [
    ring_swapped,
    all_rings_swapped,
    merge_dropped,
    merge_doubled,
    merge_into_wrong_line,
    merge_from_wrong_slot,
    last_hop_dropped,
    wait_missing,
    wait_doubled,
    wait_too_late,
    block_doubled,
    block_dropped,
    block_in_wrong_slot,
    block_in_wrong_accumulator,
    blocks_before_their_chunks,
    sent_before_complete,
    slot_reused_early,
    own_chunk_overwritten,
    receive_slot_out_of_range,
    released_too_early,
    released_too_late,
    wrong_chunk_sent,
    wrong_slot_sent,
    two_hops_of_one_ring_in_a_step,
    other_slot_counts,
]


@pytest.mark.parametrize("mutants", MUTANTS, ids=lambda mutants: mutants.__name__)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_spoilt_lists_are_refused(direction: Direction, mutants: Mutants) -> None:
    count = 0
    for tile in TILES:
        for ratio in (0.2, 1.4):
            schedule = build(direction, tile, costs(direction, "mha", ratio), "per_axis")
            check(schedule)
            for mutant in mutants(schedule):
                count += 1
                with pytest.raises(AssertionError, match=f"{direction} list of tile {tile}, step"):
                    check(mutant)
    assert count, "this mutant was never made"


def test_dkv_one_hop_short_is_named() -> None:
    schedule = build("backward", Tile(2, 3), costs("backward", "mha", 0.5))
    last = [t for t in schedule.transfers if t.payload == "dkv"][-1]
    with pytest.raises(AssertionError, match="dkv makes 1 hops, not 2"):
        check(without(schedule, last))


def test_ring_slot_is_not_taken_while_the_receiver_may_still_use_it() -> None:
    """A sender that is ahead must find the slot free by the promise of the list, not by luck of timing."""
    schedule = build("forward", Tile(1, 6), costs("forward", "mha", 2.0))
    fourth = next(t for t in schedule.transfers if t.index == 4)
    first = next(t for t in schedule.transfers if t.index == 1)
    assert first.recv_slot == fourth.recv_slot
    start = next(n for n, step in enumerate(schedule.steps) if fourth in step.transfers)
    for mutant in spoil_transfers(schedule, lambda t: t == first, lambda t: replace(t, last_use=start)):
        with pytest.raises(AssertionError, match="overwrites kv 1"):
            check(mutant)
