"""Who computes what: the assignment matrix of Mesh-Attention, its groups and its rings.

P = a * b ranks share one sequence, cut into P chunks; rank i owns query chunk i and key/value chunk i. A tile
(a, b) gives every rank a query chunks times b key/value chunks to compute. Rank i sits in tile row ``i // a``
and tile column ``i % a``; its own chunk lies in both its sets (the local Q-KV property), so a-1 query and b-1
key/value chunks are fetched. The tile (1, P) is Ring-Attention. Source: arXiv 2512.20968 (assignment matrix).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["row", "col"]


@dataclass(frozen=True, order=True)
class Tile:
    """The share of one rank: ``a`` query chunks by ``b`` key/value chunks; ``a * b`` ranks."""

    a: int
    b: int

    def __post_init__(self) -> None:
        if self.a < 1 or self.b < 1:
            raise ValueError(f"tile {self.a}x{self.b}: both sides must be at least 1")

    @classmethod
    def parse(cls, text: str) -> Tile:
        """Read ``"2x4"`` (2 query chunks by 4 key/value chunks); ValueError for any other form."""
        a, cross, b = text.strip().lower().partition("x")
        if not (cross and a.isdecimal() and b.isdecimal()):
            raise ValueError(f"tile {text!r}: write it as AxB with two whole numbers, for example 2x4")
        return cls(int(a), int(b))

    @property
    def ranks(self) -> int:
        return self.a * self.b

    def size(self, axis: Axis) -> int:
        """Chunks of one rank along an axis, which is also the number of ranks on that ring."""
        return self.a if axis == "row" else self.b

    def __str__(self) -> str:
        return f"{self.a}x{self.b}"


def tiles(ranks: int) -> tuple[Tile, ...]:
    """All tiles of ``ranks`` ranks, ``a`` ascending; the first, (1, ranks), is Ring-Attention."""
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, but a mesh has at least 1 rank")
    return tuple(Tile(a, ranks // a) for a in range(1, ranks + 1) if ranks % a == 0)


@dataclass(frozen=True)
class Assignment:
    """The assignment matrix of a tile, seen from any rank 0 <= i < P.

    Along the axes in ``turned`` everything goes round the ring to the right instead of to the left: what is
    said of right neighbours is then true of left ones.
    """

    tile: Tile
    turned: frozenset[Axis] = frozenset()

    @property
    def ranks(self) -> int:
        return self.tile.ranks

    def owner(self, p: int, q: int) -> int:
        """The rank that computes query chunk p against key/value chunk q."""
        a = self.tile.a
        return (p // a) * a + q % a

    def matrix(self) -> tuple[tuple[int, ...], ...]:
        """``matrix()[p][q]`` is ``owner(p, q)``."""
        chunks = range(self.ranks)
        return tuple(tuple(self.owner(p, q) for q in chunks) for p in chunks)

    def row_index(self, i: int) -> int:
        """Tile row of rank i; also its position on its column ring."""
        return i // self.tile.a

    def col_index(self, i: int) -> int:
        """Tile column of rank i; also its position on its row ring."""
        return i % self.tile.a

    def queries(self, i: int) -> tuple[int, ...]:
        """The query chunks of rank i, ascending."""
        return self.row_group(i)

    def keys(self, i: int) -> tuple[int, ...]:
        """The key/value chunks of rank i, ascending."""
        return self.col_group(i)

    def row_group(self, i: int) -> tuple[int, ...]:
        """The a ranks that share the queries of rank i, in ring order: sends go to the left neighbour."""
        first = self.row_index(i) * self.tile.a
        return tuple(range(first, first + self.tile.a))

    def col_group(self, i: int) -> tuple[int, ...]:
        """The b ranks that share the keys of rank i, in ring order."""
        return tuple(range(self.col_index(i), self.ranks, self.tile.a))

    def query_chunk(self, i: int, k: int) -> int:
        """The global query chunk that rank i calls Q#k; Q#0 is its own."""
        a = self.tile.a
        return self.row_index(i) * a + (self.col_index(i) + self._step("row") * k) % a

    def key_chunk(self, i: int, k: int) -> int:
        """The global key/value chunk that rank i calls KV#k; KV#0 is its own."""
        return (i + self._step("col") * k * self.tile.a) % self.ranks

    def chunk(self, i: int, axis: Axis, k: int) -> int:
        """The global chunk that rank i calls #k along an axis."""
        return self.query_chunk(i, k) if axis == "row" else self.key_chunk(i, k)

    def _step(self, axis: Axis) -> int:
        return -1 if axis in self.turned else 1

    def neighbour(self, i: int, axis: Axis, offset: int) -> int:
        """The rank at ``offset`` from rank i along its ring of ``axis``."""
        return self.chunk(i, axis, offset)

    def picture(self) -> str:
        """The matrix for a terminal: one line a query chunk, one cell a key/value chunk.

        A cell names the rank that computes the block; own blocks (p, p) stand in brackets, rules part the
        tile rows.
        """
        width = len(str(self.ranks - 1))
        chunks = range(self.ranks)
        head = " " * (width + 5) + "".join(f" {q:>{width}} " for q in chunks)
        rule = " " * (width + 4) + "+" + "-" * ((width + 2) * self.ranks)
        lines = ["rank that computes (query chunk, key/value chunk)", head.rstrip(), rule]
        for p in chunks:
            if p and p % self.tile.a == 0:
                lines.append(rule)
            cells = (
                f"[{r:>{width}}]" if p == q else f" {r:>{width}} " for q, r in enumerate(self.matrix_row(p))
            )
            lines.append((f"  Q{p:<{width}} |" + "".join(cells)).rstrip())
        return "\n".join(lines)

    def matrix_row(self, p: int) -> tuple[int, ...]:
        """Line p of the matrix."""
        return tuple(self.owner(p, q) for q in range(self.ranks))

    def check(self) -> None:
        """Assert that tiles cover all blocks once, agree with ``owner`` and hold their ranks' own chunks."""
        seen: set[tuple[int, int]] = set()
        for i in range(self.ranks):
            queries = {self.query_chunk(i, k) for k in range(self.tile.a)}
            keys = {self.key_chunk(i, k) for k in range(self.tile.b)}
            assert queries == set(self.queries(i)), f"rank {i}: local query numbers name {sorted(queries)}"
            assert keys == set(self.keys(i)), f"rank {i}: local key numbers name {sorted(keys)}"
            assert i in queries and i in keys, f"rank {i} does not compute with its own chunk"
            blocks = {(p, q) for p in queries for q in keys}
            assert not blocks & seen, f"rank {i} repeats blocks {sorted(blocks & seen)}"
            assert all(self.owner(p, q) == i for p, q in blocks), f"rank {i}: owner() names another rank"
            seen |= blocks
        assert len(seen) == self.ranks**2, f"{self.ranks**2 - len(seen)} blocks have no rank"
