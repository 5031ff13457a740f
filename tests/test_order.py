"""Ranks that run their passes in another order than the others: an error on all, never a wrong sum."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

import meshattn as ma
from meshattn import agreement
from meshattn.agreement import Agreement
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks

RANKS, ODD = 3, 1
Step = Callable[[AttentionMesh, bool], Any]


def _forward(mesh: AttentionMesh) -> Tensor:
    seq = mesh.sequence(11)
    x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
    out = ma.mesh_attention(x, x, x, seq, causal=True)
    assert isinstance(out, Tensor)
    return out


def _extra_forward(mesh: AttentionMesh, odd: bool) -> None:
    if odd:
        _forward(mesh)
    _forward(mesh).sum().backward()


def _missing_backward(mesh: AttentionMesh, odd: bool) -> None:
    out = _forward(mesh)
    if not odd:
        out.sum().backward()
    _forward(mesh)


def _swapped_backward(mesh: AttentionMesh, odd: bool) -> None:
    outs = [_forward(mesh), _forward(mesh)]
    for out in outs if odd else reversed(outs):
        out.sum().backward()


STEPS: dict[str, Step] = {
    "extra-forward": _extra_forward,
    "missing-backward": _missing_backward,
    "swapped-backward": _swapped_backward,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("name", STEPS)
def test_a_rank_out_of_step_is_named_on_all_ranks(name: str, backend: Any) -> None:
    step = STEPS[name]

    def on_rank(group: Any) -> tuple[Exception | None]:
        mesh = ma.init_attention_mesh(group, tile=(1, RANKS), timeout=2.0)
        try:
            for _ in range(3):  # all alike, until every call of the step is foreseen
                step(mesh, False)
            step(mesh, mesh.rank == ODD)
            step(mesh, False)
        except (ValueError, ma.TransportError) as error:
            return (error,)
        return (None,)

    for rank, (failure,) in enumerate(run_ranks(RANKS, on_rank, backend, timeout=40)):
        assert isinstance(failure, ma.RankMismatchError), f"rank {rank}: {failure!r}"
        assert "rank 1" in str(failure)


class StalledStore(HashStore):
    """A store whose host stands still: a look never returns."""

    def check(self, *_: Any) -> bool:
        time.sleep(30)
        return False


def test_a_stalled_store_does_not_hold_up_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_STORE_GRACE", 0.2)
    begin = time.monotonic()
    assert Agreement(StalledStore(), 0, [0, 1], 0.2).blame() is None
    with pytest.raises(ma.TransportError, match="does not answer"):
        Agreement(StalledStore(), 0, [0, 1], 0.2).enter("call", {})
    assert time.monotonic() - begin < 10
