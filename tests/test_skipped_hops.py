"""What no document and no window needs is not moved: counted on every rank, and in exact bytes."""

from __future__ import annotations

from typing import Any

import pytest

import meshattn as ma
from cases import Shape
from distributed import assert_equals_oracle, check_cases, run_case
from mesh_cases import LAYOUTS, Case, Packed
from meshattn.documents import Documents
from meshattn.masks import MaskRule, visible_blocks
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import choose_tile, message_bytes, reached_bytes, traffic
from meshattn.plan.hops import Reach
from meshattn.testing import run_ranks
from test_traffic import DIRECTIONS, call_shape

SHAPE = Shape(B=1, S=48, H=4, H_kv=2, D=8, D_v=16)
TILES = [Tile(1, 6), Tile(2, 3), Tile(3, 2), Tile(6, 1)]
MASKS: dict[str, dict[str, Any]] = {
    "short-documents": {"documents": Packed((0, 5, 8, 16, 24, 24, 30, 41, 48))},
    "one-long-document": {"documents": Packed((0, 40, 44))},
    "causal": {"causal": True},
    "window": {"window_size": (5, 0)},
    "window-full": {"window_size": (9, 2), "causal": False},
    "cross": {"kv_layout": "contiguous", "shape": Shape(B=1, S=7, H=4, H_kv=2, D=8, S_k=50)},
    "decode": {"kv_layout": "striped", "shape": Shape(B=1, S=1, H=4, H_kv=2, D=8, S_k=50)},
}


def expected_counts(case: Case, rank: int) -> dict[Any, tuple[int, int]]:
    """Messages and bytes of a rank by phase, axis and way, from the masks alone."""
    documents = None
    if case.documents is not None:
        documents = Documents(case.documents.bounds, case.documents.bounds)
    rule = MaskRule.build(causal=case.causal, window_size=case.window_size, documents=documents)
    reach = Reach(case.tile, visible_blocks(rule, case.chunks, case.key_chunks))
    shape = call_shape(case)
    counts = {}
    for direction in DIRECTIONS:
        hops = reach.hops(rank, reach.paths(message_bytes(direction, shape)))
        for (axis, way), part in traffic(direction, case.tile, shape, hops).items():
            if part.num_messages:
                counts[direction, axis, way] = part.num_messages, part.num_bytes
    return counts


def counts_of(case: Case) -> list[Any]:
    """Counters of every rank after both passes."""

    def on_rank(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group, tile=case.tile)
        return run_case(mesh, case), mesh.traffic()

    answers = run_ranks(case.ranks, on_rank)
    assert_equals_oracle(case, [results for results, _ in answers])
    return [records for _, records in answers]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_counters_equal_the_hops_that_take_place(tile: Tile, layout: Any, name: str) -> None:
    """Bytes and messages of each rank, phase, axis and way; what one rank sends, its neighbour receives."""
    case = Case(tile, layout=layout, **{"shape": SHAPE, **MASKS[name]})
    by_rank = counts_of(case)
    for rank, records in enumerate(by_rank):
        sent = {(r.phase, r.axis, r.flow): (r.messages, r.sent_bytes) for r in records if r.messages}
        assert sent == expected_counts(case, rank), f"{case}, rank {rank}"
    for flow in {(r.phase, r.axis, r.flow) for records in by_rank for r in records}:
        mine = [r for records in by_rank for r in records if (r.phase, r.axis, r.flow) == flow]
        assert sum(r.sent_bytes for r in mine) == sum(r.received_bytes for r in mine)


def total_sent(case: Case) -> int:
    return sum(record.sent_bytes for records in counts_of(case) for record in records)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_documents_inside_chunks_move_nothing(tile: Tile) -> None:
    """Contiguous chunks of eight tokens that hold whole documents, and one that holds none."""
    packed = Packed((0, 3, 8, 8, 16, 23, 24, 32, 36))
    assert total_sent(Case(tile, SHAPE, "contiguous", documents=packed)) == 0
    assert total_sent(Case(tile, SHAPE, "contiguous", documents=packed, causal=False)) == 0


@pytest.mark.parametrize("ranks", [3, 4, 8], ids="P{}".format)
def test_a_window_needs_the_keys_of_the_rank_before(ranks: int) -> None:
    """One chunk of keys from every rank but the last, for any P; backward their gradients too, back again."""
    shape = Shape(B=1, S=6 * ranks, H=2, H_kv=2, D=8)
    case = Case(Tile(1, ranks), shape, "contiguous", window_size=(6, 0))
    chunk = 6 * 2 * (8 + 8) * 8  # tokens, heads, head sizes of k and v, bytes of float64
    by_rank = counts_of(case)
    sent = [sum(r.sent_bytes for r in records if r.phase == "forward") for records in by_rank]
    assert sent == [chunk] * (ranks - 1) + [0]
    sent = [sum(r.sent_bytes for r in records if r.phase == "backward") for records in by_rank]
    assert sent == [chunk, *[2 * chunk] * (ranks - 2), chunk]


def test_auto_takes_the_tile_that_moves_least_under_the_mask() -> None:
    """Not the one that is best without: a ring here, where that is a tile of 2 by 4."""
    shape = Shape(B=1, S=48, H=8, H_kv=2, D=8)
    case = Case(Tile(1, 8), shape, "contiguous", window_size=(6, 0))
    rule = MaskRule.build(causal=True, window_size=case.window_size)
    facts = visible_blocks(rule, case.chunks, case.chunks)
    sizes = call_shape(case)
    assert choose_tile(8, sizes, visibility=facts) == Tile(1, 8) != choose_tile(8, sizes)

    def on_rank(group: Any) -> int:
        mesh = ma.init_attention_mesh(group, tile="auto")
        run_case(mesh, case)
        return sum(record.sent_bytes for record in mesh.traffic())

    reach = Reach(Tile(1, 8), facts)
    expected = sum(reached_bytes(direction, sizes, reach)[0] for direction in DIRECTIONS)
    assert sum(run_ranks(8, on_rank)) == expected


def test_causal_contiguous_chunks_move_half() -> None:
    """Keys go to the ranks behind them and no further; all of them go all the way without the mask."""
    causal, full = (Case(Tile(1, 6), SHAPE, "contiguous", causal=causal) for causal in (True, False))
    forward = [
        sum(r.sent_bytes for records in counts_of(case) for r in records if r.phase == "forward")
        for case in (causal, full)
    ]
    assert 2 * forward[0] == forward[1] > 0


def test_gloo_skips_the_same_hops() -> None:
    """Between processes, where a half that one side leaves out and the other awaits would hang."""
    cases = [
        Case(tile, SHAPE, layout, documents=Packed((0, 5, 8, 16, 24, 24, 30, 41, 45)), causal=causal)
        for tile, layout, causal in (
            (Tile(1, 4), "contiguous", True),
            (Tile(2, 2), "zigzag", False),
            (Tile(4, 1), "striped", True),
        )
    ]
    check_cases(cases, "gloo", timeout=60)
