"""What a token can touch: a change of one changes no bit where the mask lets it reach nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

import distributed
from cases import Shape
from distributed import assert_same_bits, run_cases
from mesh_cases import Case, Packed, inputs_of
from meshattn.plan.assignment import Tile
from meshattn.reference import visible_pairs
from probes import changed, results_of, with_token

SHAPE = Shape(B=1, S=22, H=2, H_kv=1, D=8)
CASES = {
    "documents": Case(Tile(2, 3), SHAPE, "zigzag", documents=Packed((0, 3, 4, 15, 20))),
    "gaps": Case(Tile(1, 4), SHAPE, documents=Packed((0, 5, 14, 22), (5, 6, 7)), causal=False),
    "window": Case(Tile(1, 6), SHAPE, "contiguous", window_size=(4, 0)),
    "window-full": Case(Tile(3, 2), SHAPE, "striped", causal=False, window_size=(2, 3)),
    "cross": Case(Tile(2, 2), replace(SHAPE, S_k=31), kv_layout="contiguous"),
    "cross-documents": Case(
        Tile(4, 1),
        replace(SHAPE, S_k=13),
        causal=False,
        documents=Packed((0, 7, 9, 22)),
        kv_layout="zigzag",
        kv_documents=Packed((0, 2, 6, 12)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_key_touches_the_queries_that_see_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And through them the gradients of the keys that they see too; nothing else."""
    case = CASES[name]
    inputs = inputs_of(case.shape, case.dtype, case.seed)
    visible = visible_pairs(case.shape.S, case.shape.seq_len_k, **case.rule)
    before = results_of(case, inputs, monkeypatch)
    for position in (0, 4, 9, 12):
        found = changed(before, results_of(case, with_token(inputs, "k v", position), monkeypatch))
        queries = visible[:, position]
        seeing = set(queries.nonzero().flatten().tolist())
        beside = set(visible[queries].any(0).nonzero().flatten().tolist())
        choosing = {x for x in seeing if visible[x].sum() > 1}  # a row of one key has no gradient
        assert found["out"] == found["lse"] == seeing and choosing <= found["dq"] <= seeing, position
        assert found["dk"] <= beside and found["dv"] <= beside, position
        assert bool(found["dk"]) == bool(choosing), position


@pytest.mark.parametrize("name", CASES)
def test_a_query_touches_its_own_row_and_the_keys_it_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    inputs = inputs_of(case.shape, case.dtype, case.seed)
    visible = visible_pairs(case.shape.S, case.shape.seq_len_k, **case.rule)
    before = results_of(case, inputs, monkeypatch)
    for position in (0, 3, 7, 16):
        found = changed(before, results_of(case, with_token(inputs, "q do", position), monkeypatch))
        seen = set(visible[position].nonzero().flatten().tolist())
        own = {position} if seen else set()
        assert found["lse"] == own and found["dv"] == seen and found["dk"] <= seen, position
        assert found["out"] <= own and found["dq"] <= own, position
        if len(seen) > 1:  # a row of one key is that key's value
            assert found["out"] == found["dq"] == own and found["dk"], position


@pytest.mark.parametrize("name", CASES)
def test_what_padding_holds_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the sequence and rows that belong to no document: NaN, as everywhere here, or numbers."""
    (before,) = run_cases([CASES[name]])
    monkeypatch.setattr(distributed, "PADDING", 3.0)
    (after,) = run_cases([CASES[name]])
    assert_same_bits(before, after)
