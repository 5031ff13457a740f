"""Ranks whose copy engines run the operations of a shuffled world."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fake_streams import Op, SharedMemory, Shuffled, World
from meshattn.transport.base import Message, Traffic
from meshattn.transport.exchange import CopyEngine
from meshattn.transport.symmetric import SymmetricTransport

CPU = torch.device("cpu")
NBYTES = 32
MADE: list[CopyEngine] = []  # by the test that runs, whose end closes them


class Rank:
    """One rank of a ring that runs a shuffled world."""

    def __init__(
        self,
        world: World,
        memory: SharedMemory,
        rank: int,
        ranks: int,
        *,
        one_queue: bool = False,
        timeout: float = 60.0,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self.ops = Shuffled(world, rank, one_queue=one_queue)
        self.engine = CopyEngine(
            self.ops, lambda n: memory.allocate(rank, n), rank, [10 + r for r in range(ranks)], timeout
        )
        MADE.append(self.engine)
        self.transport = SymmetricTransport(self.engine, None, Traffic())  # type: ignore[arg-type]

    def message(self, slot: int, number: int = 0, *, made: bool = True, again: bool = False) -> Message:
        left, right = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        label = f"forward step {number}/9, kv #1"
        return Message("forward", "col", "inward", label, left, right, slot, made, again)

    def compute(self, run: Callable[[], object]) -> None:
        self.ops.enqueue(self.ops.stream, Op(run, name="compute"))


def ring_pass(rank: Rank, hops: int, slots: int, seen: list[int], tag: int, made: bool = False) -> None:
    """A ring as the engine runs it: start, compute on the last chunk, wait, release when both are done.

    If what is sent is said to be made in the pass, it may also be.
    """
    run_ring(rank, rank.transport.buffers("col", "inward", NBYTES, slots, CPU), hops, seen, tag, made)


def run_ring(
    rank: Rank, received: list[Tensor], hops: int, seen: list[int], tag: int, made: bool = False
) -> None:
    """The pass in the memory that it receives in."""
    slots = len(received)
    own = torch.empty(NBYTES, dtype=torch.uint8)
    rank.compute(lambda: own.fill_(tag + rank.rank))
    current, held = own, None

    def use(chunk: Tensor, poison: bool) -> None:
        seen.extend(sorted({int(x) for x in chunk}))
        if poison:
            chunk.fill_(255)

    for hop in range(hops):
        slot = hop % slots
        message = rank.message(slot, hop, made=made, again=not made and hop + slots < hops)
        if made:
            rank.compute(lambda chunk=current: chunk.add_(100).sub_(100))
        handle = rank.transport.start(message, [current], [received[slot]])
        rank.compute(lambda chunk=current: use(chunk, False))
        handle.wait()
        rank.compute(lambda chunk=current: chunk.fill_(255))  # also the own one, which may be freed now
        if held is not None:
            held.release()
        current, held = received[slot], handle
    rank.compute(lambda chunk=current: use(chunk, True))
    if held is not None:
        held.release()
