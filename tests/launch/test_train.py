"""Training on several ranks is training on one: gradients of every weight, losses, weights."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import data
import meshattn as ma
import steps
from meshattn.layouts import LayoutKind
from meshattn.testing import run_ranks
from model import Decoder, ModelConfig

TEXT = data.Corpus((Path(__file__),), (0, Path(__file__).stat().st_size))
CONFIG = ModelConfig(dim=64, layers=2, heads=4, kv_heads=2)


def gradients(
    kind: str, tile: str, layout: LayoutKind, seq_len: int, window: int = -1, heads: int = 1
) -> dict[str, Any]:
    """Loss, tokens and all gradients of one rank of the default group; float32."""
    seq = ma.init_attention_mesh(tile=tile, heads=heads, timeout=60).sequence(seq_len, layout=layout)
    model = Decoder(CONFIG, seed=1)
    ids = data.batch(TEXT, seed=0, step=0, batch_size=2, seq_len=seq_len)
    result = steps.compute_gradients(model, ids, seq, steps.make_attention(kind, seq, window=window))
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": result.loss, "tokens": result.tokens, "gradients": found}


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="module", params=[129, 64], ids=["S129", "S64"])
def single(request: pytest.FixtureRequest) -> dict[str, Any]:
    seq_len = request.param
    (found,) = run_ranks(1, lambda group: gradients("single", "1x1", "striped", seq_len), backend="gloo")
    return {"seq_len": seq_len, **found}


@pytest.mark.parametrize(
    ("kind", "heads", "tile", "layout"),
    [
        ("ring", 1, "1x2", "striped"),
        ("mesh", 1, "2x1", "zigzag"),
        ("mesh", 1, "2x2", "striped"),
        ("mesh", 1, "2x2", "contiguous"),
        ("ring", 1, "1x4", "zigzag"),
        ("mesh", 2, "2x1", "striped"),
        ("mesh", 4, "1x1", "contiguous"),
    ],
    ids=lambda value: str(value),
)
def test_gradients_equal_those_of_one_rank(
    single: dict[str, Any], kind: str, heads: int, tile: str, layout: LayoutKind
) -> None:
    num_ranks = heads * int(tile[0]) * int(tile[2])
    found = run_ranks(
        num_ranks,
        lambda group: gradients(kind, tile, layout, single["seq_len"], heads=heads),
        backend="gloo",
    )
    for rank in found:
        assert rank["tokens"] == single["tokens"] == 2 * (single["seq_len"] - 1)
        assert rank["loss"] == pytest.approx(single["loss"], rel=1e-6)
        assert rank["gradients"].keys() == single["gradients"].keys()
        for name, want in single["gradients"].items():
            assert relative(rank["gradients"][name], want) < 1e-5, name
    for name, want in found[0]["gradients"].items():
        assert all(torch.equal(rank["gradients"][name], want) for rank in found), name


def test_a_window_is_the_same_on_a_mesh_and_is_not_the_whole() -> None:
    def losses(tile: str) -> Any:
        return lambda group: [gradients("mesh", tile, "striped", 67, window)["loss"] for window in (9, -1)]

    ((narrow, whole),), mesh = (
        run_ranks(num_ranks, losses(tile), backend="gloo") for num_ranks, tile in ((1, "1x1"), (2, "2x1"))
    )
    assert mesh[0] == pytest.approx([narrow, whole], rel=1e-6)
    assert abs(narrow - whole) > 1e-5


def test_packed_documents_train_as_they_would_alone() -> None:
    """Two ranks, three documents in one sequence: their labels and the sum of their gradients."""
    borders = data.documents(seed=5, step=0, seq_len=67, mean=25)
    ids = data.batch(TEXT, seed=0, step=0, batch_size=2, seq_len=67, borders=borders)

    def run(seq_len: int, ids: Tensor, cu_seqlens: list[int] | None) -> tuple[steps.StepResult, Decoder]:
        seq = ma.init_attention_mesh(timeout=60).sequence(seq_len, cu_seqlens=cu_seqlens)
        model = Decoder(CONFIG, seed=1)
        return steps.compute_gradients(model, ids, seq, steps.make_attention("mesh", seq)), model

    def packed(group: Any) -> tuple[float, int, list[Tensor | None]]:
        result, model = run(67, ids, borders)
        return result.loss, result.tokens, [weight.grad for weight in model.parameters()]

    def alone(group: Any) -> tuple[float, int, list[Tensor]]:
        runs = [run(b - a, ids[:, a:b], None) for a, b in pairwise(borders)]
        tokens = sum(result.tokens for result, _ in runs)
        shares = [result.tokens / tokens for result, _ in runs]
        models = [model for _, model in runs]
        gradients = [
            sum(share * weight.grad for share, weight in zip(shares, weights, strict=True))
            for weights in zip(*(model.parameters() for model in models), strict=True)
        ]
        loss = sum(share * result.loss for share, (result, _) in zip(shares, runs, strict=True))
        return loss, tokens, gradients

    assert len(borders) > 3
    ((loss, tokens, gradients),) = run_ranks(1, alone, backend="gloo")
    for rank in run_ranks(2, packed, backend="gloo"):
        assert rank[0] == pytest.approx(loss, rel=1e-6) and rank[1] == tokens
        assert all(relative(x, y) < 1e-5 for x, y in zip(rank[2], gradients, strict=True))


def trained(tile: str, num_steps: int) -> tuple[list[float], dict[str, Tensor]]:
    seq = ma.init_attention_mesh(tile=tile, timeout=60).sequence(96)
    model = Decoder(CONFIG, seed=1)
    optimizer = steps.make_optimizer(model, lr=3e-3, weight_decay=0.1)
    losses = []
    for step in range(num_steps):
        ids = data.batch(TEXT, seed=0, step=step, batch_size=1, seq_len=96)
        losses.append(steps.compute_gradients(model, ids, seq, steps.make_attention("mesh", seq)).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


def test_weights_stay_equal_on_all_ranks_and_the_run_repeats_its_bits() -> None:
    first, again = (run_ranks(2, lambda group: trained("2x1", 8), backend="gloo") for _ in range(2))
    losses, weights = first[0]
    assert losses[-1] < losses[0] - 0.5
    for others_losses, others in [first[1], *again]:
        assert others_losses == losses
        assert all(torch.equal(others[name], weights[name]) for name in weights)


def test_the_loss_weighs_tokens_and_not_ranks() -> None:
    """Four ranks, five tokens: a rank holds two labels, one or none, and all four labels count the same."""

    def loss(group: Any) -> float:
        seq = ma.init_attention_mesh(timeout=60).sequence(5, layout="contiguous")
        ids = data.batch(TEXT, seed=0, step=0, batch_size=1, seq_len=5)
        return steps.compute_gradients(Decoder(CONFIG), ids, seq, steps.make_attention("mesh", seq)).loss

    (want,), got = (run_ranks(num_ranks, loss, backend="gloo") for num_ranks in (1, 4))
    assert got == pytest.approx([want] * 4, rel=1e-6)


def test_warm_up_is_a_ramp_and_then_flat() -> None:
    rates = [steps.warmed_up(2.0, step, 3) for step in range(6)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_norms_do_not_decay() -> None:
    optimizer = steps.make_optimizer(Decoder(CONFIG), lr=1.0, weight_decay=0.1)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            assert (group["weight_decay"] == 0.1) == (weight.dim() >= 2)
