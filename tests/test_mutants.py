"""The comparisons of these tests can fail: each mutant of the engine is caught by one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from cases import Shape
from distributed import assert_equals_oracle, run_case
from mesh_cases import Case
from meshattn import engine, masks
from meshattn.layouts import Layout
from meshattn.masks import MaskRule
from meshattn.plan.assignment import Assignment, Tile
from meshattn.plan.schedule import Merge, Transfer
from meshattn.program import Call
from meshattn.testing import run_ranks
from meshattn.transport.base import Message, Traffic
from meshattn_kernels import Intervals
from test_traffic import counted, formula

SHAPE = Shape(B=1, S=26, H=2, H_kv=1, D=8)
Patch = Callable[[pytest.MonkeyPatch], None]


def _oracle_comparison(case: Case) -> None:
    assert_equals_oracle(
        case,
        run_ranks(case.ranks, lambda group: run_case(ma.init_attention_mesh(group, tile=case.tile), case)),
    )


def _counter_comparison(case: Case) -> None:
    def on_rank(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group, tile=case.tile)
        run_case(mesh, case)
        return counted(mesh.traffic())

    for flows in run_ranks(case.ranks, on_rank):
        assert flows == formula(case)


def _swap_the_rings(patch: pytest.MonkeyPatch) -> None:
    def neighbour(self: Assignment, i: int, axis: str, offset: int) -> int:
        return self.query_chunk(i, -offset) if axis == "row" else self.key_chunk(i, -offset)

    patch.setattr(Assignment, "neighbour", neighbour)


def _without(dropped: Callable[[Merge], bool]) -> Patch:
    def mutate(patch: pytest.MonkeyPatch) -> None:
        merge = engine._Pass.merge

        def mutant(self: engine._Pass, entry: Merge) -> None:
            if not dropped(entry):
                merge(self, entry)

        patch.setattr(engine._Pass, "merge", mutant)

    return mutate


def _forget_the_scale(patch: pytest.MonkeyPatch) -> None:
    forward = engine.forward

    def mutant(call: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return forward(replace(call, softmax_scale=1.0), *tensors)

    patch.setattr(engine, "forward", mutant)


def _move_the_causal_edge(patch: pytest.MonkeyPatch) -> None:
    block_intervals = masks.block_intervals

    def mutant(rule: MaskRule, q_layout: Layout, i: int, kv_layout: Layout, j: int) -> Intervals:
        return block_intervals(replace(rule, right=1), q_layout, i, kv_layout, j)

    patch.setattr(masks, "block_intervals", mutant)


def _send_the_wrong_chunk(patch: pytest.MonkeyPatch) -> None:
    """Each rank hands on its own chunk again, instead of the one that it received last."""

    def of_own(half: Callable[[engine._Pass, Transfer], Any]) -> Any:
        return lambda self, transfer: half(
            self, replace(transfer, send_slot=0) if transfer.inward else transfer
        )

    for name in ("outgoing", "incoming"):
        patch.setattr(engine._Pass, name, of_own(getattr(engine._Pass, name)))


WRONG_RESULTS: dict[str, tuple[Patch, Tile]] = {
    "ring-direction-swapped": (_swap_the_rings, Tile(1, 4)),
    "rings-of-a-tile-swapped": (_swap_the_rings, Tile(3, 3)),
    "a-merge-of-out-dropped": (_without(lambda m: m.payload == "out" and m.index == 0), Tile(2, 2)),
    "a-merge-of-dq-dropped": (_without(lambda m: m.payload == "dq" and m.index == 2), Tile(3, 2)),
    "dkv-one-hop-short": (_without(lambda m: m.payload == "dkv" and m.index == 0), Tile(1, 4)),
    "dkv-one-hop-short-in-a-tile": (_without(lambda m: m.payload == "dkv" and m.index == 0), Tile(2, 3)),
    "scale-forgotten": (_forget_the_scale, Tile(2, 2)),
    "causal-band-off-by-one": (_move_the_causal_edge, Tile(2, 2)),
    "own-chunk-handed-on": (_send_the_wrong_chunk, Tile(1, 3)),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_the_oracle_comparison_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, tile = WRONG_RESULTS[name]
    case = Case(tile, SHAPE)
    _oracle_comparison(case)
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"error .* > |padding rows"):
        _oracle_comparison(case)


Tensors = Sequence[Tensor]


def _count_one_less(traffic: Traffic, message: Message, send: Tensors, recv: Tensors) -> None:
    if message.label.startswith("backward") and "dkv #1" in message.label:
        return
    COUNT(traffic, message, send, recv)


def _count_elements(traffic: Traffic, message: Message, send: Tensors, recv: Tensors) -> None:
    halves = ([x.view(-1)[: x.numel() // 2] for x in parts] for parts in (send, recv))
    COUNT(traffic, message, *halves)


COUNT = Traffic.count


@pytest.mark.parametrize(
    "mutant", [_count_one_less, _count_elements], ids=["a-message-missed", "bytes-halved"]
)
def test_the_counter_comparison_fails(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Tile(2, 3), SHAPE)
    _counter_comparison(case)
    monkeypatch.setattr(Traffic, "count", mutant)
    with pytest.raises(AssertionError):
        _counter_comparison(case)


def test_a_counter_copied_from_the_formula_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send four bytes more a message: a counter of the real buffers sees them, a formula would not."""
    from meshattn.transport.base import Transport

    case = Case(Tile(2, 2), SHAPE)
    start = Transport.start

    def longer(self: Transport, message: Message, send: Tensors, recv: Tensors) -> Any:
        more = torch.zeros(4, dtype=torch.uint8)
        return start(self, message, [*send, more], [*recv, more.clone()])

    monkeypatch.setattr(Transport, "start", longer)
    _oracle_comparison(case)
    with pytest.raises(AssertionError):
        _counter_comparison(case)
