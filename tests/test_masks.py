"""Row intervals against brute force: every cell of every pair of chunks."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from meshattn.documents import Documents, checked_cu_seqlens
from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import MaskRule, block_intervals, visible_blocks
from meshattn.plan.assignment import Assignment, tiles
from meshattn.reference import visible_pairs
from meshattn_kernels.intervals import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals
from meshattn_kernels.tile_ranges import visible_ranges

KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
WINDOWS = [(-1, -1), (0, 0), (1, -1), (-1, 2), (3, 1), (8, 5)]


def cut(kind: LayoutKind, seq_len: int, chunks: int, heads: int = 1) -> Layout:
    return Layout(kind, seq_len, chunks, heads * -(-seq_len // (heads * chunks)))


def cells(intervals: Intervals, q_layout: Layout, kv_layout: Layout) -> Tensor:
    """The block as a matrix, bool [C_q, C_k]."""
    start, end = intervals.bounds(q_layout.rows)
    key = torch.arange(kv_layout.rows)
    return (start[:, None] <= key) & (key < end[:, None])


def expected_cells(visible: Tensor, q_layout: Layout, i: int, kv_layout: Layout, j: int) -> Tensor:
    """The same cut out of the global mask, padding invisible."""
    padded = torch.zeros(q_layout.chunks * q_layout.rows, kv_layout.chunks * kv_layout.rows, dtype=torch.bool)
    padded[: q_layout.seq_len, : kv_layout.seq_len] = visible
    return padded[list(q_layout.positions(i))][:, list(kv_layout.positions(j))]


def check_order(intervals: Intervals, q_layout: Layout) -> None:
    """What kernels rely on: bounds in order and within the keys, padding rows empty."""
    start, end = (bound.long() for bound in intervals.bounds(q_layout.rows))
    assert (start.diff() >= 0).all() and (end.diff() >= 0).all(), intervals
    assert (start <= end).all() and (start >= 0).all() and (end <= intervals.n_k).all(), intervals
    assert (start[intervals.n_q :] == end[intervals.n_q :]).all(), intervals


def check_rule(q_layout: Layout, kv_layout: Layout, **rule: Any) -> None:
    """All pairs of chunks under a rule, given as the arguments of ``visible_pairs``."""
    visible = visible_pairs(q_layout.seq_len, kv_layout.seq_len, **rule)
    q_bounds, k_bounds = rule.pop("cu_seqlens_q", None), rule.pop("cu_seqlens_k", None)
    documents = None if q_bounds is None else Documents(q_bounds, k_bounds)
    mask = MaskRule.build(documents=documents, **rule)
    for i in range(q_layout.chunks):
        for j in range(kv_layout.chunks):
            intervals = block_intervals(mask, q_layout, i, kv_layout, j)
            expected = expected_cells(visible, q_layout, i, kv_layout, j)
            where = f"{mask}, queries {i} of {q_layout}, keys {j} of {kv_layout}"
            assert torch.equal(cells(intervals, q_layout, kv_layout), expected), where
            assert intervals.num_pairs == int(expected.sum()), where
            assert intervals.is_empty == (not expected.any()), where
            check_order(intervals, q_layout)


def random_cuts(rng: random.Random, most: int) -> tuple[int, ...]:
    """Cumulated lengths of 1 to 5 documents, some of them empty, mostly with a tail that belongs to none."""
    return (0, *sorted(rng.choice([rng.randint(0, most), most]) for _ in range(rng.randint(1, 5))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window_size", WINDOWS, ids=lambda w: f"window{w[0]},{w[1]}")
def test_every_cell_of_self_attention(kind: LayoutKind, causal: bool, window_size: tuple[int, int]) -> None:
    for seq_len, chunks, heads in (
        (1, 1, 1),
        (1, 3, 1),
        (2, 5, 1),
        (12, 4, 1),
        (13, 4, 3),
        (19, 3, 2),
        (23, 5, 1),
    ):
        layout = cut(kind, seq_len, chunks, heads)
        check_rule(layout, layout, causal=causal, window_size=window_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_cell_of_cross_attention(kind: LayoutKind, causal: bool) -> None:
    rng = random.Random(f"cross {kind} {causal}")
    for _ in range(60):
        chunks = rng.randint(1, 5)
        q_layout, kv_layout = (cut(kind, rng.randint(1, 21), chunks, rng.randint(1, 2)) for _ in range(2))
        check_rule(q_layout, kv_layout, causal=causal, window_size=rng.choice(WINDOWS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_cell_of_packed_documents(kind: LayoutKind, causal: bool) -> None:
    rng = random.Random(f"documents {kind} {causal}")
    for _ in range(60):
        chunks, seq_len = rng.randint(1, 5), rng.randint(1, 25)
        layout, bounds = cut(kind, seq_len, chunks), random_cuts(rng, seq_len)
        window_size = rng.choice(WINDOWS)
        check_rule(
            layout, layout, causal=causal, window_size=window_size, cu_seqlens_q=bounds, cu_seqlens_k=bounds
        )


@pytest.mark.parametrize("kind", KINDS)
def test_every_cell_of_documents_of_other_lengths(kind: LayoutKind) -> None:
    rng = random.Random(f"cross documents {kind}")
    for _ in range(80):
        chunks = rng.randint(1, 4)
        q_layout, kv_layout = (cut(kind, rng.randint(1, 21), chunks) for _ in range(2))
        q_bounds, k_bounds = random_cuts(rng, q_layout.seq_len), random_cuts(rng, kv_layout.seq_len)
        both = min(len(q_bounds), len(k_bounds))
        check_rule(
            q_layout,
            kv_layout,
            causal=rng.random() < 0.5,
            window_size=rng.choice(WINDOWS),
            cu_seqlens_q=q_bounds[:both],
            cu_seqlens_k=k_bounds[:both],
        )


def test_every_cell_of_two_different_layouts() -> None:
    rng = random.Random("mixed")
    for _ in range(60):
        chunks = rng.randint(2, 4)
        q_layout, kv_layout = (cut(kind, rng.randint(1, 21), chunks) for kind in rng.sample(KINDS, 2))
        check_rule(q_layout, kv_layout, causal=True, window_size=rng.choice(WINDOWS))


def test_global_mask_is_the_rule_in_words() -> None:
    """``visible_pairs``, which the other tests compare with, against the rule written out for one pair."""
    q_bounds, k_bounds = (0, 3, 3, 8), (0, 4, 6, 9)
    visible = visible_pairs(
        10, 11, causal=True, window_size=(2, -1), cu_seqlens_q=q_bounds, cu_seqlens_k=k_bounds
    )
    for x in range(10):
        for y in range(11):
            seen = False
            for d in range(3):
                if q_bounds[d] <= x < q_bounds[d + 1] and k_bounds[d] <= y < k_bounds[d + 1]:
                    from_end_q, from_end_k = q_bounds[d + 1] - x, k_bounds[d + 1] - y
                    seen = 0 <= from_end_k - from_end_q <= 2
            assert bool(visible[x, y]) == seen, (x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_one_piece_layouts_without_documents_give_bands(kind: LayoutKind) -> None:
    layout, documents = cut(kind, 22, 3), Documents((0, 5, 22), (0, 5, 22))
    band = block_intervals(MaskRule.build(causal=True), layout, 1, layout, 2)
    assert isinstance(band, ArrayIntervals if kind == "zigzag" else BandIntervals)
    arrays = block_intervals(MaskRule.build(documents=documents), layout, 1, layout, 2)
    assert isinstance(arrays, ArrayIntervals)
    assert arrays.start.dtype == arrays.end.dtype == torch.int32 and arrays.start.device.type == "cpu"


def test_unbounded_and_huge_edges_stay_in_32_bits() -> None:
    layout = Layout("contiguous", 2**40, 4, 2**38)
    for rule in (MaskRule(), MaskRule(left=2**50, right=2**50), MaskRule(right=0)):
        for i, j in ((0, 3), (3, 0), (2, 2)):
            band = block_intervals(rule, layout, i, layout, j)
            assert isinstance(band, BandIntervals)
            assert band.lo >= -UNBOUNDED and band.hi <= UNBOUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_the_last_document_is_padding(kind: LayoutKind) -> None:
    layout, keys = cut(kind, 23, 4), cut(kind, 31, 4)
    rule = MaskRule.build(documents=Documents((0, 3, 17), (0, 9, 12)))
    for i in range(4):
        for j in range(4):
            block = block_intervals(rule, layout, i, keys, j)
            assert (block.n_q, block.n_k) == (layout.count_below(i, 17), keys.count_below(j, 12))


def check_visible_blocks(q_layout: Layout, kv_layout: Layout, rule: MaskRule) -> None:
    """The facts about all pairs of chunks at once, against each of them alone."""
    facts = visible_blocks(rule, q_layout, kv_layout)
    assert len(facts.keys) == q_layout.chunks
    for i in range(q_layout.chunks):
        for j in range(kv_layout.chunks):
            empty = block_intervals(rule, q_layout, i, kv_layout, j).is_empty
            assert facts.sees(i, j) == (not empty), (
                f"{rule}, queries {i} of {q_layout}, keys {j} of {kv_layout}"
            )
        assert facts.keys[i] < 1 << kv_layout.chunks


@pytest.mark.parametrize("kind", KINDS)
def test_visible_blocks_are_those_that_are_not_empty(kind: LayoutKind) -> None:
    rng = random.Random(f"visible {kind}")
    for number in range(150):
        chunks = rng.randint(1, 7)
        q_layout, kv_layout = (cut(kind, rng.randint(1, 40), chunks, rng.randint(1, 2)) for _ in range(2))
        if number % 2:
            kv_layout = q_layout
        if number % 5 == 0:
            kv_layout = cut(rng.choice(KINDS), rng.randint(1, 40), chunks)
        q_bounds, k_bounds = random_cuts(rng, q_layout.seq_len), random_cuts(rng, kv_layout.seq_len)
        both = min(len(q_bounds), len(k_bounds))
        documents = Documents(q_bounds[:both], k_bounds[:both]) if rng.random() < 0.5 else None
        causal, window_size = rng.random() < 0.5, rng.choice(WINDOWS)
        rule = MaskRule.build(causal=causal, window_size=window_size, documents=documents)
        check_visible_blocks(q_layout, kv_layout, rule)


@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
def test_causal_striping_balances_every_tile(ranks: int) -> None:
    rule = MaskRule.build(causal=True)
    for rows in (1, 7, 32):
        layout = Layout("striped", ranks * rows, ranks, rows)
        for tile in tiles(ranks):
            assignment = Assignment(tile)
            pairs = [
                sum(
                    block_intervals(rule, layout, p, layout, q).num_pairs
                    for p in assignment.queries(i)
                    for q in assignment.keys(i)
                )
                for i in range(ranks)
            ]
            assert sum(pairs) == ranks * rows * (ranks * rows + 1) // 2
            assert max(pairs) - min(pairs) <= ranks * rows, (tile, pairs)


def test_row_blocks_agree_with_the_bounds_and_both_forms_agree() -> None:
    rng = random.Random("row blocks")
    for _ in range(100):
        layout = cut("striped", rng.randint(2, 30), rng.randint(1, 4))
        i, j = rng.randrange(layout.chunks), rng.randrange(layout.chunks)
        mask = MaskRule.build(causal=rng.random() < 0.5, window_size=rng.choice(WINDOWS))
        band = block_intervals(mask, layout, i, layout, j)
        if band.n_q == 0:
            continue
        start, end = band.bounds(layout.rows)
        r0 = rng.randrange(band.n_q)
        r1 = rng.randint(r0 + 1, band.n_q)
        rows = band.row_block(r0, r1)
        assert rows == ArrayIntervals(start, end, band.n_q, band.n_k).row_block(r0, r1)
        assert (rows.first_start, rows.first_end) == (start[r0], end[r0])
        assert (rows.last_start, rows.last_end) == (start[r1 - 1], end[r1 - 1])
        for t0 in range(band.n_k):
            for t1 in range(t0 + 1, band.n_k + 1):
                all_seen = bool(((start[r0:r1] <= t0) & (t1 <= end[r0:r1])).all())
                assert rows.is_visible(t0, t1) == all_seen


def test_rules_with_equal_documents_are_equal() -> None:
    one, other = (MaskRule.build(documents=Documents((0, 3, 7), (0, 2, 7))) for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert one != MaskRule.build(documents=Documents((0, 3, 7), (0, 3, 7)))


def test_causal_overrides_the_right_window_as_in_flash_attention() -> None:
    assert MaskRule.build(causal=True, window_size=(4, 3)) == MaskRule(left=4, right=0)
    assert MaskRule.build(window_size=(-1, 3)) == MaskRule(left=None, right=3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2**31, 2**62 - 1, 2**62, sys.maxsize, 2**70], ids=str)
def test_a_window_beyond_any_sequence_is_no_bound(kind: LayoutKind, size: int) -> None:
    """And no sum with it leaves int64."""
    q_layout, kv_layout = cut(kind, 13, 3), cut(kind, 9, 3)
    documents = Documents((0, 4, 13), (0, 5, 8))
    for packed in (None, documents):
        wide = MaskRule.build(window_size=(size, size), documents=packed)
        open_ = MaskRule.build(documents=packed)
        assert visible_blocks(wide, q_layout, kv_layout) == visible_blocks(open_, q_layout, kv_layout)
        for i, j in itertools.product(range(3), range(3)):
            seen, all_keys = (
                cells(block_intervals(rule, q_layout, i, kv_layout, j), q_layout, kv_layout)
                for rule in (wide, open_)
            )
            assert torch.equal(seen, all_keys), (packed, i, j)


@pytest.mark.parametrize("window_size", [(-2, 0), (0, -5), (1,), (1, 2, 3), (1.5, 0)])
def test_bad_windows_are_refused(window_size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="window_size"):
        MaskRule.build(window_size=window_size)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([], "cumulated lengths behind a 0"),
        ([0], "cumulated lengths behind a 0"),
        ([1, 4], "cumulated lengths behind a 0"),
        ([0, 5, 3, 8], "decreases from 5 to 3 at entry 2"),
        ([0, 5, 9], "ends at 9, beyond the sequence length 8"),
        (torch.tensor([0.0, 4.0]), "1-D tensor of integers"),
        (torch.tensor([[0, 4]]), "1-D tensor of integers"),
    ],
    ids=["none", "no documents", "not from 0", "decreasing", "too long", "floats", "2-D"],
)
def test_bad_cu_seqlens_are_refused(bounds: list[int] | Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"cu_seqlens.*{message}"):
        checked_cu_seqlens(bounds, 8)


def test_good_cu_seqlens_become_integers() -> None:
    expected = (0, 0, 3, 3, 8)
    assert checked_cu_seqlens(list(expected), 8) == expected
    assert checked_cu_seqlens(torch.tensor(expected, dtype=torch.int32), 9) == expected


def test_documents_must_fit_each_other_and_the_sequences() -> None:
    with pytest.raises(ValueError, match="seq has 2 documents and kv_seq 1"):
        Documents((0, 2, 4), (0, 4))
    with pytest.raises(ValueError, match="cu_seqlens of kv_seq decreases"):
        Documents((0, 2, 4), (0, 4, 2))
    layout = cut("striped", 6, 2)
    with pytest.raises(ValueError, match="cu_seqlens of seq ends at 7, beyond the sequence length 6"):
        block_intervals(MaskRule(documents=Documents((0, 7), (0, 6))), layout, 0, layout, 1)


@pytest.mark.parametrize(("seq_len", "ranks", "window"), [(8192, 4, 1024), (10007, 5, 700), (6000, 3, 2500)])
def test_windows_of_contiguous_chunks_fill_their_tiles(seq_len: int, ranks: int, window: int) -> None:
    """Computed tiles of 64 rows by 128 keys: at most 1.2 times the ideal, and one more a block of rows."""
    layout, rule = cut("contiguous", seq_len, ranks), MaskRule.build(causal=True, window_size=(window, 0))
    computed = pairs = 0
    for i in range(ranks):
        for j in range(ranks):
            block = block_intervals(rule, layout, i, layout, j)
            computed += visible_ranges(block, layout.rows, layout.rows, 64, 128).pairs
            pairs += block.num_pairs
    assert computed <= 1.2 * pairs / (64 * 128) + ranks * -(-layout.rows // 64)
