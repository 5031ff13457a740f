"""Figures of layouts under masks against brute force, and what is recommended."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from meshattn import advice
from meshattn.advice import compare_layouts, layout_figures, mask_of
from meshattn.layouts import Layout, LayoutKind
from meshattn.masks import MaskRule, visible_blocks
from meshattn.plan import Assignment, CallShape, Reach, Tile, choose_tile
from meshattn.plan.cost import reached_bytes
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.timeline import run
from meshattn.reference import visible_pairs
from plan.topology_cases import cluster

KINDS: tuple[LayoutKind, ...] = get_args(LayoutKind)
WINDOWS = [(None, None), (None, 0), (5, 0), (3, 4), (0, 0), (40, 0)]


def shape_of(seq_len: int, ranks: int, kv_heads: int = 8) -> CallShape:
    rows = -(-seq_len // ranks)
    return CallShape(1, rows, 8, kv_heads, 64, 64, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True)


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"window{window[0]},{window[1]}")
@pytest.mark.parametrize("kind", KINDS)
def test_figures_equal_brute_force(
    kind: LayoutKind, window: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every pair, and every tile of every pair of pieces, here of 4 rows by 8 keys."""
    monkeypatch.setattr(advice, "ROWS", 4)
    monkeypatch.setattr(advice, "KEYS", 8)
    advice._count_band.cache_clear()
    seq_len, ranks = 53, 4
    left, right = window
    shape = shape_of(seq_len, ranks)
    visible = visible_pairs(seq_len, seq_len, window_size=tuple(-1 if n is None else n for n in window))
    layout = Layout(kind, seq_len, ranks, shape.rows)
    tiles = torch.zeros(ranks, ranks, dtype=torch.int64)
    for p in range(ranks):
        for q in range(ranks):
            for x in layout.pieces(p):
                for y in layout.pieces(q):
                    rows, keys = ([n for n in piece.positions() if n < seq_len] for piece in (x, y))
                    cells = visible[rows][:, keys]
                    for part in cells.split(4):
                        tiles[p, q] += sum(bool(cell.any()) for cell in part.split(8, dim=1))
    found = layout_figures(kind, seq_len, ranks, shape, left, right)
    advice._count_band.cache_clear()
    facts = visible_blocks(MaskRule(left, right), layout, layout)
    assert found.tile == choose_tile(ranks, shape, visibility=facts)
    for direction, sent in found.sent_bytes.items():
        assert sent == reached_bytes(direction, shape, Reach(found.tile, facts))[0] // ranks
    plan = Assignment(found.tile)
    of_ranks = [int(tiles[list(plan.queries(i))][:, list(plan.keys(i))].sum()) for i in range(ranks)]
    assert found.fill == int(visible.sum()) / (sum(of_ranks) * 4 * 8)
    assert found.imbalance == max(of_ranks) * ranks / sum(of_ranks)


@pytest.mark.parametrize("ranks", [4, 8, 64], ids="P{}".format)
@pytest.mark.parametrize("kv_heads", [8, 1])
def test_windows_of_a_chunk_want_contiguous(ranks: int, kv_heads: int) -> None:
    """For their full tiles and few bytes."""
    seq_len = 2048 * ranks
    first, *others = compare_layouts(seq_len, ranks, shape_of(seq_len, ranks, kv_heads), 1024, 0)
    striped = next(each for each in others if each.layout == "striped")
    assert first.layout == "contiguous"
    assert first.fill > 1.2 * striped.fill and first.time < striped.time
    assert sum(first.sent_bytes.values()) < sum(striped.sent_bytes.values())


def test_causal_wants_even_ranks() -> None:
    first, *others = compare_layouts(65536, 8, shape_of(65536, 8), None, 0)
    contiguous = next(each for each in others if each.layout == "contiguous")
    assert first.layout == "striped" and first.imbalance < 1.02 < 1.5 < contiguous.imbalance


@pytest.mark.parametrize("kind", KINDS)
def test_masks_for_the_emulator_count_what_is_visible(kind: LayoutKind) -> None:
    """And a window is emulated faster in chunks that lie together."""
    cut = Layout(kind, 53, 4, 14)
    for left, right in WINDOWS:
        mask = mask_of(cut, left, right)
        visible = visible_pairs(53, 53, window_size=tuple(-1 if n is None else n for n in (left, right)))
        total = sum(mask.part(p, q) for p in range(4) for q in range(4)) * 14**2
        assert round(total) == int(visible.sum())
        assert mask.visibility == visible_blocks(MaskRule(left, right), cut, cut)


def test_a_window_is_emulated_faster_where_its_hops_are_left_out() -> None:
    seq_len, ranks = 2048 * 8, 8
    topology, tile = cluster(4, between=1.0), Cut(1, Tile(1, ranks))
    times = {}
    for kind in KINDS:
        mask = mask_of(Layout(kind, seq_len, ranks, 2048), 1024, 0)
        script = pass_script("forward", shape_of(seq_len, ranks), tile, topology, mask=mask)
        times[kind] = run(script, topology).total_us
    assert times["contiguous"] < times["zigzag"] < times["striped"]


@pytest.mark.parametrize("documents", [(), (31,), (7, 1, 40, 40, 40)], ids=["one", "long", "several"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"window{window[0]},{window[1]}")
@pytest.mark.parametrize("kind", KINDS)
def test_priced_masks_count_the_tiles_that_kernels_compute(
    kind: LayoutKind, window: tuple[int | None, int | None], documents: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Between the visible pairs themselves and all tiles that a document and a piece may touch; a causal or a
    full block counts a half or one, a block that nobody sees nothing."""
    monkeypatch.setattr(advice, "ROWS", 2)
    monkeypatch.setattr(advice, "KEYS", 4)
    advice._count_band.cache_clear()
    ranks, rows = 4, 32
    left, right = window
    cut = Layout(kind, ranks * rows, ranks, rows)
    if documents:
        documents = (*documents, ranks * rows - sum(documents))
    mask = advice.priced_mask_of(cut, left, right, documents)
    ends = torch.tensor([0, *documents]).cumsum(0)
    bounds = {"cu_seqlens_q": ends, "cu_seqlens_k": ends} if documents else {}
    size = tuple(-1 if n is None else n for n in window)
    visible = visible_pairs(ranks * rows, ranks * rows, window_size=size, **bounds)
    for p in range(ranks):
        for q in range(ranks):
            part = mask.part(p, q)
            pairs = visible[list(cut.positions(p))][:, list(cut.positions(q))].double().mean().item()
            if kind != "striped":
                assert (part > 0) == (pairs > 0)
            assert pairs - 0.1 <= part <= min(1.0, pairs + 0.35)
            if not documents and window == (None, None):
                assert part == 1.0
            if kind == "striped" and not documents and window == (None, 0):
                assert part == pytest.approx(0.5, abs=0.03)
    advice._count_band.cache_clear()
