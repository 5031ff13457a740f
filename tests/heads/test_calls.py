"""Calls on a mesh with a head axis: which rows a rank holds, which heads it takes, autograd around them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from cases import make_inputs
from distributed import build_mesh, local_inputs
from head_cases import GROUPED, SHAPE, Axes, axes_id, head_case
from mesh_cases import LAYOUTS
from meshattn import reference
from meshattn.layouts import Layout, LayoutKind
from meshattn.testing import run_ranks
from tolerance import assert_close


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("axes", [(2, 1, 2), (3, 1, 1), (4, 2, 1), (2, 3, 1)], ids=axes_id)
def test_rows_of_consecutive_ranks_are_a_chunk(axes: Axes, layout: LayoutKind) -> None:
    """In order, so that nothing is permuted; every token is on one rank, and padding ends its shard."""
    w, a, b = axes

    def on_rank(group: Any) -> list[tuple[list[int], list[int], int, int]]:
        mesh = ma.init_attention_mesh(group, tile=(a, b), heads=w)
        found = []
        for seq_len in range(1, 3 * w * a * b + 2):
            seq = mesh.sequence(seq_len, layout=layout)
            shard = seq.shard(torch.arange(1, seq_len + 1), dim=0)
            labels = seq.shift_labels(torch.arange(seq_len), dim=0)
            assert seq.unshard(shard, dim=0).tolist() == list(range(1, seq_len + 1))
            assert (shard[: seq.real_rows] - 1).tolist() == seq.position_ids()[: seq.real_rows].tolist()
            wanted = [x if 0 < x < seq_len else -100 for x in shard.tolist()]
            assert labels.tolist() == wanted
            found.append((shard.tolist(), labels.tolist(), seq.rows, seq.real_rows))
        return found

    by_rank = run_ranks(w * a * b, on_rank)
    for number, seq_len in enumerate(range(1, 3 * w * a * b + 2)):
        whole = Layout(layout, seq_len, a * b, w * -(-seq_len // (w * a * b)))
        for chunk in range(a * b):
            shards = [by_rank[chunk * w + place][number] for place in range(w)]
            joined = [x for shard, *_ in shards for x in shard]
            expected = [x + 1 if x < seq_len else 0 for x in whole.positions(chunk)]
            assert joined == expected
            assert all(shard[:real] == [x for x in shard if x] for shard, _, _, real in shards)


def test_gradients_through_lse_and_sinks_and_again() -> None:
    """Sinks are shared out with their heads; their gradients sum over ranks; a second derivative raises."""
    case = head_case((2, 2, 1), GROUPED, head_groups=2)
    values = torch.linspace(-1.0, 1.0, 16, dtype=torch.float64)

    def on_rank(group: Any) -> list[Tensor]:
        mesh = build_mesh(group, case)
        q, k, v, do = (x.requires_grad_() for x in local_inputs(case, mesh.rank))
        sinks = values.clone().requires_grad_()
        seq = mesh.sequence(case.shape.S)
        out, lse = ma.mesh_attention(q, k, v, seq, causal=True, sinks=sinks, return_lse=True)
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        loss = (out * do.detach().nan_to_num()).sum() + seen.square().sum()
        grads = torch.autograd.grad(loss, (q, k, v, sinks), create_graph=True)
        for gradient in grads:
            with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
                torch.autograd.grad(gradient.sum(), (q, sinks), retain_graph=True)
        wholes = [seq.unshard(x.detach()) for x in grads[:3]]
        return [*wholes, grads[3].detach()]

    q, k, v, do = (x.requires_grad_() for x in make_inputs(case.shape))
    sinks = values.clone().requires_grad_()
    out, lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    expected = torch.autograd.grad((out * do).sum() + lse.square().sum(), (q, k, v, sinks))
    by_rank = run_ranks(4, on_rank)
    for name, mine, exact in zip(("dq", "dk", "dv"), by_rank[0], expected, strict=False):
        assert_close(name, mine, exact)
    assert_close("dsinks", sum(results[3] for results in by_rank), expected[3])


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1).flatten(-2)[..., ::2]


def _from_an_odd_place(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("lay", [_transposed, _every_other, _from_an_odd_place])
def test_tensors_may_lie_anyhow(lay: Any) -> None:
    """Of 2 bytes an element, which are moved as words of 8."""
    case = head_case((2, 1, 1), dtype=torch.bfloat16)

    def on_rank(group: Any) -> bool:
        mesh = build_mesh(group, case)
        seq = mesh.sequence(SHAPE.S)
        results = []
        for change in (lambda x: x, lay):
            q, k, v, do = map(change, local_inputs(case, mesh.rank))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ma.mesh_attention(*leaves, seq, causal=True)
            assert isinstance(out, Tensor)
            results.append([out, *torch.autograd.grad(out, leaves, do)])
        return all(torch.equal(x, y) for x, y in zip(*results, strict=True))

    assert all(run_ranks(2, on_rank))


def test_checkpoints_and_autocast() -> None:
    """The recomputed pass exchanges again, with the same bits."""
    case = head_case((2, 1, 2), dtype=torch.float32)

    def on_rank(group: Any) -> bool:
        mesh = build_mesh(group, case)
        seq = mesh.sequence(SHAPE.S)
        leaves = [x.requires_grad_() for x in local_inputs(case, mesh.rank)[:3]]

        def attend(*tensors: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = ma.mesh_attention(*tensors, seq, causal=True)
            assert isinstance(out, Tensor) and out.dtype == torch.bfloat16
            return out.float()[:, : seq.real_rows]

        plain = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
        again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).square().sum(), leaves)
        return all(torch.equal(x, y) for x, y in zip(plain, again, strict=True))

    assert all(run_ranks(4, on_rank))


def test_a_tile_chosen_by_bytes() -> None:
    """Inside, a rank has fewer heads and a longer chunk; the ranks that share it out are fewer."""

    def on_rank(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group, heads=2)
        assert "heads 2" in mesh.describe() and "tile auto" in mesh.describe()
        seq = mesh.sequence(16)
        q, k = torch.randn(1, seq.rows, 4, 8), torch.randn(1, seq.rows, 2, 8)
        ma.mesh_attention(q, k, k, seq)
        return {record.axis for record in mesh.traffic()}

    assert all("heads" in axes for axes in run_ranks(8, on_rank))


@pytest.mark.parametrize(
    ("groups", "kv_heads", "query_heads", "words"),
    [
        ("auto", 2, 4, (r"q has 4 heads, which the 3 ranks", "heads= one of 1, which divide its 3 ranks")),
        (2, 6, 6, ()),
        (2, 3, 6, ("head_groups=2", "has 1 key/value heads", "head_groups='auto'")),
    ],
    ids=["heads-of-4-on-3", "groups-that-fit", "groups-that-do-not"],
)
def test_heads_that_cannot_be_shared_out(
    groups: Any, kv_heads: int, query_heads: int, words: tuple[str, ...]
) -> None:
    """On every rank, before anything moves, with the way out; the mesh can be used on."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, heads=3, head_groups=groups)
        seq = mesh.sequence(7)
        q, k = torch.ones(1, seq.rows, query_heads, 8), torch.ones(1, seq.rows, kv_heads, 8)
        for word in words:
            with pytest.raises(ValueError, match=word):
                ma.mesh_attention(q, k, k, seq)
        assert mesh.traffic() == () or not words
        six = torch.ones(1, seq.rows, 6, 8)
        ma.mesh_attention(six, six, six, seq)

    run_ranks(3, on_rank)


def test_the_axes_that_are_named_instead_can_share_the_heads() -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, heads=4)
        q = torch.ones(1, mesh.sequence(9).rows, 6, 8)
        with pytest.raises(ValueError, match="q has 6 heads, which the 4 ranks") as refused:
            ma.mesh_attention(q, q, q, mesh.sequence(9))
        found = re.search(r"one of ([\d, ]+), which divide its 4 ranks", str(refused.value))
        assert found is not None
        for axis in map(int, found[1].split(", ")):
            seq = ma.init_attention_mesh(group, heads=axis).sequence(9)
            q = torch.ones(1, seq.rows, 6, 8)
            ma.mesh_attention(q, q, q, seq)

    run_ranks(4, on_rank)


def test_ranks_that_disagree_on_the_axis() -> None:
    def on_rank(group: Any) -> None:
        with pytest.raises(ma.RankMismatchError, match="heads is 1 on rank 2, but 2 on ranks 0, 1, 3"):
            ma.init_attention_mesh(group, heads=1 if group.rank == 2 else 2, timeout=5)

    run_ranks(4, on_rank)
