"""How a sequence is cut into chunks: striped, zigzag or contiguous. Pure integers, no torch.

Letters: S global sequence length, P number of chunks (one a rank of the row and column axes), C rows of a
chunk. Every chunk has C rows, also when P * C > S: the rows at positions >= S are padding. Positions increase
inside every chunk, so padding is always a suffix of the chunk, and a chunk may be all padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

LayoutKind = Literal["striped", "zigzag", "contiguous"]


@dataclass(frozen=True)
class Piece:
    """An affine run of rows: its row n stands at the global position ``offset + n * stride``."""

    offset: int
    stride: int
    length: int

    def positions(self) -> range:
        return range(self.offset, self.offset + self.length * self.stride, self.stride)

    def count_below(self, position: int) -> int:
        """Number of rows of the piece whose position is below ``position``."""
        return min(max(-((self.offset - position) // self.stride), 0), self.length)


@dataclass(frozen=True)
class Layout:
    """The cut of positions 0 .. seq_len - 1 into ``chunks`` chunks of ``rows`` rows.

    striped      chunk i holds the positions i, i + P, i + 2P, ...: under a causal mask every pair of chunks
                 has about half of its pairs visible, so all ranks have equal work for every tile.
    zigzag       chunk i holds two runs: the i-th first half, and the i-th second half. First halves have
                 ceil(C/2) rows and tile the sequence from its start in order; second halves have floor(C/2)
                 rows and tile the rest in reverse order.
    contiguous   chunk i holds the positions i*C .. (i+1)*C - 1.

    Raises ValueError for an unknown kind, a size below 1, or chunks too small to hold the sequence.
    """

    kind: LayoutKind
    seq_len: int
    chunks: int
    rows: int

    def __post_init__(self) -> None:
        if self.kind not in get_args(LayoutKind):
            raise ValueError(f"layout is {self.kind!r}; it must be one of {', '.join(get_args(LayoutKind))}")
        for name, size in (("seq_len", self.seq_len), ("chunks", self.chunks), ("rows", self.rows)):
            if size < 1:
                raise ValueError(f"{name} of a layout is {size}; it must be at least 1")
        if self.chunks * self.rows < self.seq_len:
            raise ValueError(
                f"{self.chunks} chunks of {self.rows} rows hold {self.chunks * self.rows} positions, fewer "
                f"than seq_len {self.seq_len}; use at least {-(-self.seq_len // self.chunks)} rows"
            )

    def pieces(self, chunk: int) -> tuple[Piece, ...]:
        """The runs that make up a chunk, in row order; their lengths sum to ``rows``, none is empty."""
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        if self.kind == "striped":
            return (Piece(chunk, self.chunks, self.rows),)
        if self.kind == "contiguous":
            return (Piece(chunk * self.rows, 1, self.rows),)
        first, second = self._halves
        head = Piece(chunk * first, 1, first)
        tail = Piece(self.chunks * first + (self.chunks - 1 - chunk) * second, 1, second)
        return (head, tail) if second else (head,)

    def rows_in(self, chunk: int) -> int:
        """Number of real rows of a chunk, those at positions below ``seq_len``; they come first."""
        return self.count_below(chunk, self.seq_len)

    def count_below(self, chunk: int, position: int) -> int:
        """Number of rows of a chunk whose position is below ``position``: the row where that position would
        go."""
        return sum(piece.count_below(position) for piece in self.pieces(chunk))

    def positions(self, chunk: int) -> Sequence[int]:
        """Global positions of the ``rows`` rows of a chunk, increasing; padding rows have positions >=
        seq_len."""
        pieces = self.pieces(chunk)
        if len(pieces) == 1:
            return pieces[0].positions()
        return list(chain.from_iterable(piece.positions() for piece in pieces))

    def locate(self, position: int) -> tuple[int, int]:
        """The (chunk, row) that holds a global position: the inverse of ``positions``, padding included."""
        if not 0 <= position < self.chunks * self.rows:
            raise ValueError(
                f"position is {position}; this layout holds the positions 0 .. {self.chunks * self.rows - 1}"
            )
        if self.kind == "striped":
            return position % self.chunks, position // self.chunks
        if self.kind == "contiguous":
            return position // self.rows, position % self.rows
        first, second = self._halves
        if position < self.chunks * first:
            return position // first, position % first
        reverse, row = divmod(position - self.chunks * first, second)
        return self.chunks - 1 - reverse, first + row

    @property
    def _halves(self) -> tuple[int, int]:
        return self.rows - self.rows // 2, self.rows // 2
