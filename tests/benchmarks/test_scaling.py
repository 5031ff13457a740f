"""The scaling study in small: what methods may do, the double ring, and the report."""

from __future__ import annotations

import pytest

import scaling
from meshattn.plan import Tile, total_bytes
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.script import Exchange, Kernel
from meshattn.plan.timeline import run
from plan.topology_cases import call, cluster
from study.double_ring import double_ring


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_double_ring_moves_what_a_ring_moves_by_other_ways(direction: str) -> None:
    topology, shape = cluster(4, between=1.0), call(300)
    script = double_ring(direction, shape, 12, topology)  # type: ignore[arg-type]
    sent = sum(entry.num_bytes for entry in script.entries if isinstance(entry, Exchange))
    assert sent == total_bytes(direction, Tile(1, 12), shape)  # type: ignore[arg-type]
    blocks = [entry for entry in script.entries if isinstance(entry, Kernel) and entry.name == "block"]
    assert len(blocks) == 12
    ring = pass_script(direction, shape, Cut(1, Tile(1, 12)), topology)  # type: ignore[arg-type]
    both = [run(each, topology).total_us for each in (script, ring)]
    assert 12 * float(str(blocks[0].us)) <= both[0] < both[1]


def test_methods_have_their_own_cuts() -> None:
    every = {method: {cut for cut, _ in scaling.candidates(method, 16, 8)} for method in scaling.METHODS}
    assert every["ring"] == {Cut(1, Tile(1, 16))} and every["ulysses"] == {Cut(16, Tile(1, 1))}
    assert every["usp"] == {Cut(w, Tile(1, 16 // w)) for w in (2, 4, 8)}
    assert all(cut.heads == 1 and cut.tile.a > 1 for cut in every["mesh"])
    assert all(cut.heads > 1 and cut.tile.a > 1 for cut in every["mesh+heads"])


def test_the_report_has_all_methods() -> None:
    from study.scaling_rows import Study, less_sent, records, speed_up
    from study.scaling_tables import case_table, strong_table

    case = scaling.Case("dgx-h200", 16, 2**17, "GQA", True)
    found = scaling.answer(case)
    assert [scaling.Figures.read(one.line()) for one in found] == found
    study = Study(found)
    (methods,) = study.select(ranks=16)
    assert not study.select(ranks=8)
    assert set(methods) == set(scaling.METHODS)
    assert speed_up(methods, "ring") == 1 and less_sent(methods, "double ring") == 0
    text = case_table(methods)
    assert all(f"| {name}" in text for name in ("ring", "double ring", "USP", "mesh with head axis"))
    assert strong_table(study, "dgx-h200", "GQA", True).count("\n") == 1  # no million tokens here
    times = {r.metric: r for r in records(study) if r.metric.endswith("step ms")}
    assert times["ring: step ms"].ratio == 1 and len(times) == len(methods)


def test_a_million_tokens_on_256_gpus_scale_as_the_study_claims() -> None:
    """A tile: 3.4 times a ring with 85.4 % fewer bytes; with a head axis 95 % of the step in kernels."""
    found = {each.method: each for each in scaling.answer(scaling.Case("dgx-h200", 256, 2**20, "MHA", True))}
    ring, tile, heads = (found[name] for name in ("ring", "mesh", "mesh+heads"))
    assert ring.total_us / tile.total_us >= 3.4
    assert 1 - tile.rank / ring.rank >= 0.854
    assert heads.kernels_us / heads.total_us >= 0.95
    assert tile.total_us < found["double ring"].total_us < ring.total_us


def test_no_kernel_time_of_the_study_is_extrapolated() -> None:
    """From 64 GPUs on every cut stands in it; below, those whose blocks were too long to measure do not."""
    left_out = 0
    for case in dict.fromkeys(scaling.grid()):
        kernels = case.topology().kernels
        for method in scaling.METHODS:
            found = {scaling.is_measured(shape, kernels) for shape in scaling.block_shapes(case, method)}
            assert False not in found or case.ranks < 64, f"{case} {method}"
            left_out += False in found
    assert left_out
    long = scaling.Case("dgx-h200", 8, 2**22, "MHA", True)
    assert scaling.answer(long) == []
