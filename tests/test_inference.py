"""Inference: queries of a few tokens against the keys of all tokens so far, which stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

import meshattn as ma
from cases import Shape, make_inputs
from mesh_cases import LAYOUTS
from meshattn import reference
from meshattn.layouts import LayoutKind
from meshattn.testing import run_ranks

SHAPE = Shape(B=2, S=29, H=4, H_kv=2, D=8, D_v=16)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 4, 5], ids="P{}".format)
def test_a_prompt_in_chunks_then_token_by_token(ranks: int, layout: LayoutKind) -> None:
    """Chunks of a prompt of unequal lengths, then single tokens: causal, aligned with the last key."""
    inputs = make_inputs(SHAPE)
    expected, _ = reference.attention(inputs.q, inputs.k, inputs.v, causal=True)
    steps = [0, 11, 12, 24, *range(25, SHAPE.S + 1)]

    def on_rank(group: Any) -> torch.Tensor:
        mesh = ma.init_attention_mesh(group, tile="auto")
        parts = []
        with torch.no_grad():
            for begin, end in pairwise(steps):
                seq, keys = mesh.sequence(end - begin, layout=layout), mesh.sequence(end, layout=layout)
                q = seq.shard(inputs.q[:, begin:end])
                k, v = (keys.shard(x[:, :end]) for x in (inputs.k, inputs.v))
                out = ma.mesh_attention(q, k, v, seq, kv_seq=keys, causal=True)
                assert isinstance(out, torch.Tensor) and not out.requires_grad
                parts.append(seq.unshard(out))
        return torch.cat(parts, dim=1)

    for whole in run_ranks(ranks, on_rank):
        assert (whole - expected).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_keys_stay_where_they_are(causal: bool) -> None:
    """A token against many sharded keys: auto moves the query and partial results, and no key."""
    ranks, keys = 4, 4 * 16
    whole = make_inputs(Shape(B=1, S=1, H=4, H_kv=2, D=8, S_k=keys))

    def on_rank(group: Any) -> set[tuple[str, str]]:
        mesh = ma.init_attention_mesh(group, tile="auto")
        seq, kv_seq = mesh.sequence(1), mesh.sequence(keys)
        q, k, v = seq.shard(whole.q), kv_seq.shard(whole.k), kv_seq.shard(whole.v)
        ma.mesh_attention(q, k, v, seq, kv_seq=kv_seq, causal=causal)
        records = [record for record in mesh.traffic() if record.messages]
        query, partial = 4 * 8 * 8, 4 * (8 + 1) * 8  # one row of q; one of out and lse
        assert all(r.sent_bytes == r.messages * (query if r.flow == "inward" else partial) for r in records)
        return {(record.axis, record.flow) for record in records}

    assert set().union(*run_ranks(ranks, on_rank)) == {("row", "inward"), ("row", "outward")}


@pytest.mark.parametrize("ranks", [1, 2], ids="P{}".format)
def test_a_sequence_first_used_in_inference_mode_can_be_trained_on(ranks: int) -> None:
    """What is kept from the first call, the gaps between documents too, serves a backward pass."""
    whole = make_inputs(Shape(B=1, S=13, H=2, H_kv=2, D=8)).q

    def on_rank(group: Any) -> torch.Tensor:
        seq = ma.init_attention_mesh(group).sequence(13, cu_seqlens=[0, 6, 13], document_lengths=[5, 7])
        x = seq.shard(whole.detach()).requires_grad_()
        with torch.inference_mode():
            ma.mesh_attention(x, x, x, seq, causal=True)
        out = ma.mesh_attention(x, x, x, seq, causal=True)
        assert isinstance(out, torch.Tensor)
        (grad,) = torch.autograd.grad(out.sum(), x)
        return seq.unshard(grad)

    for grad in run_ranks(ranks, on_rank):
        assert grad[:, :5].abs().sum() > 0 and not grad[:, 5].any()


def test_an_evaluation_inside_a_training_step_changes_no_bit() -> None:
    """Between a forward and its backward: other lengths, batches and masks, without grad and with."""

    def on_rank(group: Any) -> list[list[torch.Tensor]]:
        mesh = ma.init_attention_mesh(group, tile="2x2")
        seq, other = mesh.sequence(SHAPE.S), mesh.sequence(5)
        q, k, v, do = (seq.shard(x) for x in make_inputs(SHAPE, torch.bfloat16))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        x = torch.ones(1, other.rows, 2, 8, requires_grad=True)

        def evaluate() -> None:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    ma.mesh_attention(x, x, x, other, window_size=(1, 1))
            ma.mesh_attention(x, x, x, other).sum().backward()  # type: ignore[union-attr]

        def step(between: Callable[[], None]) -> list[torch.Tensor]:
            out = ma.mesh_attention(*leaves, seq, causal=True)
            between()
            return [out, *torch.autograd.grad(out, leaves, do)]

        return [step(lambda: None), step(evaluate)]

    for plain, interrupted in run_ranks(4, on_rank):
        assert all(torch.equal(x, y) for x, y in zip(plain, interrupted, strict=True))
