"""Dropout of attention: which probabilities are kept, from a seed and global positions alone.

Two stages, so that little is left to do for a pair. Philox4x32-10 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), with the seed as its key and the counter (query position, query head, batch,
0), gives each row two words of its own. The key positions are the counter of a second generator, which the
two words key: a Weyl sequence that starts at the first word, through the multiplications and shifts of
Wellons' lowbias32 ("Prospecting for hash functions", 2018) with the second word between them. A probability
is kept if the result reaches the threshold p * 2^32.

So a mask is the same however a sequence is cut over ranks, chunks and tiles and whichever kernel computes it,
and nothing but the seed is kept for the backward pass. One call of Philox for some neighbouring pairs, as
kernels for a single device have it, would not do: of neighbours in a chunk the positions lie P apart.

A kept probability is divided by 1 - p, after the softmax: lse knows nothing of dropout. With keep in {0, 1 /
(1 - p)}: out = (p * keep) v, dv = (p * keep)^T do and ds = p * (keep * do v^T - delta), where delta =
rowsum(do * out) as ever.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from meshattn_kernels.contract import AttentionKernel
from meshattn_kernels.intervals import UNBOUNDED

_WORD = 2**32
_MASK = _WORD - 1
_ROUND = 0xD2511F53, 0xCD9E8D57
_RAISE = 0x9E3779B9, 0xBB67AE85
STEP, MIX = 0x9E3779B9, (0x7FEB352D, 0x846CA68B)
"""Of the generator of a row: the step of its Weyl sequence and the factors that mix it."""


@dataclass(frozen=True)
class Positions:
    """Global positions of a chunk's rows: row n stands at offset + n * stride, from row ``split`` on ``jump``
    further."""

    offset: int = 0
    stride: int = 1
    split: int = UNBOUNDED
    jump: int = 0

    def of(self, begin: int, end: int, device: torch.device | str = "cpu") -> Tensor:
        """Positions of the rows begin .. end - 1, int64."""
        row = torch.arange(begin, end, dtype=torch.int64, device=device)
        return self.offset + row * self.stride + (row >= self.split) * self.jump

    def times(self, factor: int) -> Positions:
        return Positions(self.offset * factor, self.stride * factor, self.split, self.jump * factor)

    @property
    def words(self) -> tuple[int, int, int, int]:
        """For 32-bit arithmetic, which gives the positions modulo 2^32."""
        return _signed(self.offset), _signed(self.stride), self.split, _signed(self.jump)


@dataclass(frozen=True)
class Dropout:
    """Dropout with probability ``p`` of one pair of chunks; ``first_head`` is the global number of their
    query head 0."""

    p: float
    seed: int
    queries: Positions = Positions()
    keys: Positions = Positions()
    first_head: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.p < 1, f"dropout with probability {self.p}"
        assert 0 <= self.seed < 2**64, f"seed {self.seed} has more than 64 bits"

    @cached_property
    def threshold(self) -> int:
        return min(round(self.p * _WORD), _WORD - 1)

    @cached_property
    def keep_scale(self) -> float:
        """What a kept probability is multiplied with: one over the part that is kept, which is a whole number
        of 2^-32, so that the mean over all words is exactly 1 for every p."""
        return _WORD / (_WORD - self.threshold)

    @cached_property
    def row_numbers(self) -> tuple[int, ...]:
        """What a kernel makes the words of rows from, in 32 bits: seed (low, high), first head, query
        positions."""
        low, high = _signed(self.seed), _signed(self.seed >> 32)
        return low, high, self.first_head, *self.queries.words

    @cached_property
    def key_numbers(self) -> tuple[int | float, ...]:
        """What it needs beside them, in 32 bits: threshold, scale, key positions in steps of the Weyl
        sequence."""
        return _signed(self.threshold), self.keep_scale, *self.keys.times(STEP).words

    def row_words(
        self, batch: int, heads: int, rows: tuple[int, int], device: torch.device | str
    ) -> tuple[Tensor, Tensor]:
        """The two words, int64 [B, H, R], of the rows (begin, end) of the query chunk."""
        first, second, _, _ = philox(
            self.seed,
            self.queries.of(*rows, device),
            torch.arange(self.first_head, self.first_head + heads, device=device)[:, None],
            torch.arange(batch, device=device)[:, None, None],
            torch.zeros((), dtype=torch.int64, device=device),
        )
        return first, second

    def kept(
        self, batch: int, heads: int, rows: tuple[int, int], keys: tuple[int, int], device: torch.device | str
    ) -> Tensor:
        """bool [B, H, R, T]: which probabilities of the rows and keys (begin, end) of the chunks are kept."""
        first, second = (word[..., None] for word in self.row_words(batch, heads, rows, device))
        # Products may leave int64: their lower 32 bits are right all the same.
        word = (self.keys.of(*keys, device) * STEP + first) & _MASK
        word = ((word ^ (word >> 16)) * MIX[0]) & _MASK
        word = ((word ^ (word >> 15) ^ second) * MIX[1]) & _MASK
        return word >= self.threshold


def philox(seed: int, *counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of four counter words, which are broadcast together; words are int64, modulo 2^32."""
    c0, c1, c2, c3 = (word & _MASK for word in counter)
    k0, k1 = seed & _MASK, seed >> 32
    for _ in range(10):
        high0, low0 = _product(c0, _ROUND[0])
        high1, low1 = _product(c2, _ROUND[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _RAISE[0]) % _WORD, (k1 + _RAISE[1]) % _WORD
    return c0, c1, c2, c3


def with_dropout(kernel: AttentionKernel, dropout: Dropout) -> AttentionKernel:
    """The kernel for one pair of chunks; it must be one that ``rules`` lets serve dropout."""
    return cast(AttentionKernel, dataclasses.replace(cast(Any, kernel), dropout=dropout))


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower word of x * factor, in halves so that no sum leaves int64."""
    upper, lower = x * (factor >> 16), x * (factor & 0xFFFF)
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)


def _signed(x: int) -> int:
    """The lower 32 bits of x as a signed integer."""
    return (x + 2**31) % _WORD - 2**31
