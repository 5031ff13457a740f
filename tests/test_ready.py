"""Calls that look alike are checked and planned once; any other look is checked again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from meshattn import calls
from meshattn.sequence import ShardedSequence
from meshattn.testing import run_ranks
from refused_calls import OfSeveralRanks

Call = Callable[[ShardedSequence], object]


def attend(
    seq: ShardedSequence, dtype: torch.dtype = torch.float32, heads: int = 2, **options: Any
) -> Tensor:
    x = torch.ones(1, seq.rows, heads, 8, dtype=dtype, requires_grad=True)
    out = ma.mesh_attention(x, x, x, seq, **options)
    assert isinstance(out, Tensor)
    return out


def without_grad(seq: ShardedSequence) -> Tensor:
    with torch.no_grad():
        return attend(seq)


def under_autocast(seq: ShardedSequence) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attend(seq)


def as_ring(seq: ShardedSequence) -> object:
    x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
    return ma.ring_attention(x, x, x, seq)


OTHERS: dict[str, Call] = {
    "causal": lambda seq: attend(seq, causal=True),
    "type": lambda seq: attend(seq, torch.float64),
    "heads": lambda seq: attend(seq, heads=3),
    "scale": lambda seq: attend(seq, softmax_scale=0.5),
    "window": lambda seq: attend(seq, window_size=(2, 0)),
    "kernel": lambda seq: attend(seq, kernel="reference"),
    "reduce": lambda seq: attend(seq, torch.bfloat16, reduce_dtype=torch.bfloat16),
    "grad": without_grad,
    "autocast": under_autocast,
    "ring": as_ring,
    "seed": lambda seq: attend(seq, dropout_seed=5),
    "keys": lambda seq: attend(seq, kv_seq=seq.mesh.sequence(seq.seq_len)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_another_look_is_checked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    check = calls._check_kernel

    def counted(options: Any, *rest: Any) -> Any:
        checked.append(name)
        return check(options, *rest)

    monkeypatch.setattr(calls, "_check_kernel", counted)

    def on_rank(group: Any) -> list[int]:
        seq = ma.init_attention_mesh(group).sequence(5)
        counts = []
        for call in (attend, attend, OTHERS[name], OTHERS[name] if name != "keys" else attend, attend):
            call(seq)
            counts.append(len(checked))
        return counts

    assert run_ranks(1, on_rank) == [[1, 1, 2, 2, 2]]


def test_a_wrong_call_after_a_right_one_is_refused_every_time() -> None:
    """Also where only the head size, the device, the type of an option or inference mode tell them apart."""

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group, timeout=20).sequence(5)
        size = 1, seq.rows, 2, 8

        def mixed(q: Tensor) -> Any:
            return ma.mesh_attention(q, torch.ones(size, requires_grad=True), torch.ones(size), seq)

        for _ in range(2):
            attend(seq, causal=True)
            mixed(torch.ones(size))
            for _ in range(2):
                with pytest.raises(ValueError, match="head size 12"):
                    x = torch.ones(1, seq.rows, 2, 12, requires_grad=True)
                    ma.mesh_attention(x, x, x, seq, causal=True)
                with pytest.raises(ValueError, match="q is a int"):
                    ma.mesh_attention(1, 2, 3, seq)  # type: ignore[arg-type]
                with pytest.raises(ValueError, match="on meta"):
                    x = torch.ones(size, device="meta", requires_grad=True)
                    ma.mesh_attention(x, x, x, seq, causal=True)
                with pytest.raises(ValueError, match="causal is 1"):
                    attend(seq, causal=1)
                with pytest.raises(ValueError, match="q was made in"), torch.inference_mode():
                    x = torch.ones(size)
                    with torch.inference_mode(False):
                        mixed(x)

    run_ranks(2, on_rank)


@pytest.mark.parametrize("call", [attend, without_grad], ids=["with-grad", "without-grad"])
def test_lists_are_made_for_the_passes_that_may_come(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    directions: list[str] = []
    route = calls.route

    def watched(direction: Any, *rest: Any, **how: Any) -> Any:
        directions.append(direction)
        return route(direction, *rest, **how)

    monkeypatch.setattr(calls, "route", watched)
    run_ranks(1, lambda group: call(ma.init_attention_mesh(group).sequence(5)) is None)
    assert directions == (["forward", "backward"] if call is attend else ["forward"])


def test_an_autocast_call_runs_in_the_type_of_autocast_every_time() -> None:
    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(5)
        for _ in range(2):
            assert attend(seq).dtype == torch.float32
            assert under_autocast(seq).dtype == torch.bfloat16

    run_ranks(1, on_rank)


def test_only_so_many_are_kept_and_none_keeps_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_KEPT_CALLS", 3)

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(5)
        for heads in range(1, 7):
            attend(seq, heads=heads)
            assert len(seq.ready) <= 3
        gone = weakref.ref(seq)
        del seq
        gc.collect()
        assert gone() is None

    run_ranks(1, on_rank)


def test_another_class_of_tensor_is_checked_again() -> None:
    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(5)
        attend(seq)
        x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
        with pytest.raises(ValueError, match=r"pass v\.to_local\(\)"):
            ma.mesh_attention(x, x, OfSeveralRanks(x), seq)

    run_ranks(2, on_rank)
