"""Dropout of one call: where its blocks lie in the sequence, and the seed that all ranks share.

The mask is that of `meshattn_kernels.dropout`: a function of the seed and of batch, head, query and key
positions in the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from meshattn.agreement import Agreement
from meshattn.disagreement import digest
from meshattn.layouts import Layout
from meshattn_kernels.dropout import Dropout, Positions

_SEED_BITS = 62
_COMPARED_EVERY = 1024


@dataclass(frozen=True)
class DropoutRule:
    """Dropout with probability ``p`` between chunks of two layouts; ``first_head`` is the number, among all
    heads, of the first query head of this rank."""

    p: float
    q_layout: Layout
    kv_layout: Layout
    first_head: int = 0

    def block(self, seed: int, i: int, j: int) -> Dropout:
        """For query chunk i and key chunk j."""
        queries, keys = chunk_affine(self.q_layout, i), chunk_affine(self.kv_layout, j)
        return Dropout(self.p, seed, queries, keys, self.first_head)


class DropoutSeeds:
    """The seeds of the calls of one mesh: given, or drawn from torch's CPU generator.

    A drawn seed is the same when activation checkpointing comes again to a call, because it restores the
    generator, and costs no look at a GPU. It is the same on all ranks if these seed their generators alike;
    so the ranks compare their seeds at the calls 1, 2, 4, 8, ... and at every 1024th, those of the calls
    between them too: ranks that drift apart do not stay unnoticed, also if they come together again, and a
    step pays nothing.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._calls = 0
        self._since: list[int] = []  # seeds of the calls since the last comparison

    def next(self, given: int | None, device: torch.device) -> int:
        """The seed of the next call, on tensors of ``device``. Collective now and then; raises on every rank
        if their seeds differ."""
        if given is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise NotImplementedError(
                "every replay of a CUDA graph would drop the same: capture without dropout, or pass "
                "dropout_seed if that is meant"
            )
        seed = int(torch.randint(2**_SEED_BITS, (), device="cpu")) if given is None else given
        self._calls += 1
        if self._calls & (self._calls - 1) == 0 or self._calls % _COMPARED_EVERY == 0:
            what = f"dropout, call {self._calls}"
            if given is None:
                what += (
                    " (its seed is drawn: call torch.manual_seed alike on all ranks, or pass dropout_seed)"
                )
            stated = {"dropout_seed": str(seed)}
            if self._since:
                calls = f"dropout_seed of calls {self._calls - len(self._since)} to {self._calls - 1}"
                signed = [one - (one >> 63 << 64) for one in self._since]
                stated[calls] = f"a list with digest {digest(signed)}"
            self._agreement.compare(what, stated)
            self._since.clear()
        else:
            self._since.append(seed)
        return seed


@lru_cache(maxsize=1024)
def chunk_affine(layout: Layout, chunk: int) -> Positions:
    """The positions of a chunk's rows as a kernel computes them; those of ``masks.chunk_positions``."""
    first, *others = layout.pieces(chunk)
    if not others:
        return Positions(first.offset, first.stride)
    (second,) = others
    assert first.stride == second.stride, f"pieces of different strides in {layout}"
    jump = second.offset - (first.offset + first.length * first.stride)
    return Positions(first.offset, first.stride, first.length, jump)
