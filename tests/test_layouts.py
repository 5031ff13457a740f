"""Layouts: every position in exactly one chunk, in order, padding last."""

from __future__ import annotations

from itertools import chain, pairwise, product
from typing import get_args

import pytest

from meshattn.layouts import Layout, LayoutKind

KINDS = get_args(LayoutKind)
LENGTHS = (1, 2, 5, 7, 16, 31, 48)
CHUNKS = (1, 2, 3, 5, 8)


def layouts(kind: LayoutKind) -> list[Layout]:
    """All small cuts: one row a chunk, more chunks than positions, and the rows of 1 to 3 head ranks."""
    return [
        Layout(kind, seq_len, chunks, heads * -(-seq_len // (heads * chunks)) + spare)
        for seq_len, chunks, heads, spare in product(LENGTHS, CHUNKS, (1, 2, 3), (0, 3))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_in_one_chunk(kind: LayoutKind) -> None:
    for layout in layouts(kind):
        chunks = [list(layout.positions(i)) for i in range(layout.chunks)]
        assert all(len(chunk) == layout.rows for chunk in chunks), layout
        assert sorted(chain.from_iterable(chunks)) == list(range(layout.chunks * layout.rows)), layout


@pytest.mark.parametrize("kind", KINDS)
def test_positions_increase_so_that_padding_is_a_suffix(kind: LayoutKind) -> None:
    for layout in layouts(kind):
        for i in range(layout.chunks):
            positions = layout.positions(i)
            assert all(a < b for a, b in pairwise(positions)), (layout, i)
            assert [p < layout.seq_len for p in positions] == [
                n < layout.rows_in(i) for n in range(layout.rows)
            ]
        assert sum(layout.rows_in(i) for i in range(layout.chunks)) == layout.seq_len, layout


@pytest.mark.parametrize("kind", KINDS)
def test_locate_is_the_inverse_of_positions(kind: LayoutKind) -> None:
    for layout in layouts(kind):
        for i in range(layout.chunks):
            assert [layout.locate(p) for p in layout.positions(i)] == [(i, n) for n in range(layout.rows)], (
                layout
            )


@pytest.mark.parametrize("kind", KINDS)
def test_count_below_counts_rows(kind: LayoutKind) -> None:
    for layout in layouts(kind)[::3]:
        for i in range(layout.chunks):
            for position in range(layout.chunks * layout.rows + 2):
                expected = sum(p < position for p in layout.positions(i))
                assert layout.count_below(i, position) == expected, (layout, i, position)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_spell_the_positions(kind: LayoutKind) -> None:
    for layout in layouts(kind):
        for i in range(layout.chunks):
            pieces = layout.pieces(i)
            assert len(pieces) <= (2 if kind == "zigzag" else 1)
            assert all(piece.length > 0 for piece in pieces)
            assert list(chain.from_iterable(p.positions() for p in pieces)) == list(layout.positions(i)), (
                layout
            )


def test_striped_neighbours_are_in_neighbouring_chunks() -> None:
    layout = Layout("striped", 23, 5, 5)
    assert all(layout.locate(p)[0] == p % 5 for p in range(25))


def test_contiguous_chunks_are_slices() -> None:
    layout = Layout("contiguous", 23, 5, 5)
    assert list(chain.from_iterable(layout.positions(i) for i in range(5))) == list(range(25))


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_zigzag_first_halves_run_forward_and_second_halves_back(rows: int) -> None:
    layout = Layout("zigzag", 4 * rows, 4, rows)
    head = rows - rows // 2
    heads = [list(layout.positions(i))[:head] for i in range(4)]
    tails = [list(layout.positions(i))[head:] for i in range(4)]
    assert list(chain(*heads, *reversed(tails))) == list(range(4 * rows))


@pytest.mark.parametrize(
    ("kind", "seq_len", "chunks", "rows", "message"),
    [
        ("spiral", 8, 2, 4, "layout is 'spiral'; it must be one of striped, zigzag, contiguous"),
        ("striped", 0, 2, 4, "seq_len"),
        ("striped", 8, 0, 4, "chunks"),
        ("striped", 8, 2, 0, "rows"),
        ("striped", 9, 2, 4, "use at least 5 rows"),
    ],
)
def test_bad_cuts_are_refused(kind: LayoutKind, seq_len: int, chunks: int, rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(kind, seq_len, chunks, rows)


def test_positions_outside_are_refused() -> None:
    layout = Layout("zigzag", 7, 2, 4)
    assert layout.locate(7) == (0, 3)  # padding has a place too
    for position in (-1, 8):
        with pytest.raises(ValueError, match=r"holds the positions 0 \.\. 7"):
            layout.locate(position)
