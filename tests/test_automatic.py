"""What "auto" takes on a mesh, and what a topology changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import meshattn as ma
from meshattn.plan import CallShape, Tile, check
from meshattn.plan.pace import pace_of
from meshattn.plan.placement import Cut
from meshattn.plan.planner import choose
from meshattn.plan.topology import Topology
from meshattn.testing import run_ranks
from plan.topology_cases import cluster

SLOW = cluster(3, between=0.05)


def attend(group: Any, length: int = 41, **options: Any) -> tuple[str, torch.Tensor, bool]:
    """Heads and tile, out of a call, and whether its gradients are finite."""
    mesh = ma.init_attention_mesh(group, **options)
    seq = mesh.sequence(length)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        seq.shard(torch.randn(1, length, heads, 8, generator=generator), dim=1).requires_grad_()
        for heads in (4, 2, 2)
    )
    out = ma.mesh_attention(q, k, v, seq, causal=True)
    out.sum().backward()
    finite = all(bool(x.grad.isfinite().all()) for x in (q, k, v) if x.grad is not None)
    return str(mesh.heads), seq.unshard(out.detach(), dim=1), finite


def test_a_topology_changes_the_list_and_not_the_result() -> None:
    plain = run_ranks(6, lambda group: attend(group, tile="2x3"))
    paced = run_ranks(6, lambda group: attend(group, tile="2x3", topology=SLOW))
    for (_, out, finite), (_, other, also) in zip(plain, paced, strict=True):
        assert finite and also
        torch.testing.assert_close(out, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topology", [None, SLOW], ids=["bytes", "time"])
def test_heads_and_tile_of_auto_are_those_of_the_planner(topology: Topology | None) -> None:
    more = {} if topology is None else {"topology": topology, "seq_len": 41}
    found = run_ranks(6, lambda group: attend(group, heads="auto", num_heads=(4, 2), **more))
    shape = CallShape(1, 7, 4, 2, 128, 128, 2, 4, 4, causal=True)
    assert {heads for heads, _, _ in found} == {str(choose(6, shape, heads=None, topology=topology).heads)}
    assert all(finite for _, _, finite in found)


def test_ranks_with_other_topologies_are_told() -> None:
    def build(group: Any) -> str:
        mine = cluster(3, between=1.0 + group.rank)
        with pytest.raises(ValueError, match="topology") as error:
            ma.init_attention_mesh(group, topology=mine)
        return str(error.value)

    assert all("test" in text for text in run_ranks(2, build))


def test_the_mesh_paces_its_lists_for_the_links_it_crosses() -> None:
    def paces(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group, topology=SLOW)
        return mesh.pace(Tile(3, 2)), mesh.pace(Tile(2, 3)), ma.init_attention_mesh(group).pace(Tile(3, 2))

    inside, across, plain = run_ranks(6, paces)[0]
    assert (inside.row, inside.col) == (1, 2000) and across.row == 2000
    assert inside == pace_of(SLOW, Cut(1, Tile(3, 2)))
    assert (plain.row, plain.col) == (1, 1)


def test_lists_of_any_pace_are_right() -> None:
    from meshattn.plan import build, costs

    shape = CallShape(1, 64, 4, 2, 128, 128, 2, 4, 4, causal=True)
    for tile in (Tile(2, 3), Tile(1, 5), Tile(4, 2)):
        for topology in (SLOW, replace(SLOW, gpus_per_node=2, gpus_per_nic=2)):
            pace = pace_of(topology, Cut(1, tile))
            check(build("backward", tile, costs("backward", shape, pace), pace.channels))
            check(build("forward", tile, costs("forward", shape, pace), pace.channels))


def test_a_mesh_tells_the_tiles_that_auto_took() -> None:
    def on_rank(group: Any) -> tuple[str, str, str]:
        mesh = ma.init_attention_mesh(group)
        before = mesh.describe()
        seq = mesh.sequence(13)
        q, k = torch.ones(1, seq.rows, 8, 8), torch.ones(1, seq.rows, 1, 8)
        ma.mesh_attention(q, k, k, seq)
        first = mesh.describe()
        ma.mesh_attention(q, q, q, seq)
        return before, first, mesh.describe()

    for before, first, both in run_ranks(4, on_rank):
        assert "so far" not in before
        assert "(so far 1x4)" in first, "a ring, where keys and values are small"
        assert "(so far 1x4, 2x2)" in both
