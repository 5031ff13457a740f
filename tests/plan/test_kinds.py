"""Which ranks the emulator follows: one of each kind, and how they are told apart."""

from __future__ import annotations

import itertools

import pytest

from meshattn.plan import Tile
from meshattn.plan.links import _counts
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import ORDER, Cut, Placement
from meshattn.plan.timeline import Fabric, run
from plan.emulation import CUTS, DIRECTIONS, emulate, triangle
from plan.topology_cases import call, cluster


@pytest.mark.parametrize("copies", [False, True], ids=["kernels-first", "copy-engines"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_following_one_rank_of_a_kind_is_exact(cut: Cut, copies: bool) -> None:
    topology = cluster(3, between=7.0, latency_us=1.0, gpus_per_nic=2, copy_engines=copies)
    script = pass_script("backward", call(300), cut, topology)
    kinds = run(script, topology)
    each = run(script, topology, every_rank=True)
    assert len(each.end_us) == cut.ranks >= len(kinds.end_us)
    assert [kinds.end_us[kind] for kind in kinds.kind] == pytest.approx(list(each.end_us))
    assert emulate("backward", cut, topology) == emulate("backward", cut, topology)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_following_one_rank_of_a_kind_is_exact_where_blocks_differ(cut: Cut) -> None:
    """Ranks that share a chunk do the same, and are of one kind where they are placed alike."""
    topology = cluster(3, between=7.0, latency_us=1.0, gpus_per_nic=2)
    for direction in DIRECTIONS:
        script = pass_script(direction, call(300), cut, topology, mask=triangle(cut.tile.ranks))
        kinds, each = (run(script, topology, every_rank=every) for every in (False, True))
        assert [kinds.end_us[kind] for kind in kinds.kind] == pytest.approx(list(each.end_us))
        assert max(kinds.compute_us) == pytest.approx(max(each.compute_us))


def test_ranks_of_a_chunk_are_of_one_kind() -> None:
    script = pass_script("forward", call(300), Cut(4, Tile(1, 3)), cluster(4), mask=triangle(3))
    assert len(run(script, cluster(4)).end_us) == 3


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("cut", [*CUTS, Cut(3, Tile(4, 4)), Cut(2, Tile(2, 8))], ids=str)
def test_a_period_of_ranks_tells_what_all_of_them_do(
    cut: Cut, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology, found = cluster(gpus, between=7.0, gpus_per_nic=2), []
    for of_all in (False, True):
        if of_all:
            monkeypatch.setattr(Placement, "period", cut.ranks)
        each = []
        for order in itertools.permutations(ORDER):
            script = pass_script("backward", call(300, heads=24), cut, topology, order=order)
            fabric = Fabric(script, topology)
            sharing = [
                counts * (cut.ranks // len(counts)) for counts in script.placement.sharers(fabric.keys)
            ]
            each.append((sharing, fabric.kind, _counts.__wrapped__(script.placement)))
        found.append(each)
    assert found[0] == found[1]


def test_the_period_is_short_where_axes_fill_nodes() -> None:
    for order in itertools.permutations(ORDER):
        assert Placement(Cut(8, Tile(16, 8)), order, 8).period == 8
        assert Placement(Cut(1, Tile(1, 9)), order, 4).period == 9
    assert Placement(Cut(5, Tile(2, 6)), ("heads", "row", "col"), 4).period == 20


def test_large_meshes_have_few_kinds_of_ranks() -> None:
    topology = cluster(8)
    script = pass_script("forward", call(64), Cut(1, Tile(8, 32)), topology)
    assert len(set(Fabric(script, topology).kind)) <= 8
