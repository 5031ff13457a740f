"""What grounding takes from records, and what it says of them."""

from __future__ import annotations

from dataclasses import replace

import grounding
from meshattn.plan.topology import Link, Topology
from plan.topology_cases import cluster

CASE = "B1-S1000-H8-H_kv2-D128-bfloat16-causal-striped-P6-2x3-p2p"


def record(case: str = CASE, metric: str = "forward ms", ours: float = 1.0) -> dict[str, object]:
    return {"case": case, "metric": metric, "ours": ours}


def test_a_record_says_what_was_run() -> None:
    measured = grounding.Measured.of(record())
    assert measured is not None and measured.direction == "forward" and measured.transport == "p2p"
    shape = measured.shape
    assert (shape.rows, shape.heads, shape.kv_heads, shape.itemsize, shape.reduce_itemsize) == (
        167,
        8,
        2,
        2,
        4,
    )
    assert str(measured.cut) == "1x2x3"
    for cut in ("3x2", "2x1x3"):
        other = grounding.Measured.of(record(CASE.replace("2x3", cut)))
        assert other is not None and str(other.cut).endswith(cut)
        assert other.setting == measured.setting != CASE
    for case in (CASE.replace("striped", "zigzag"), CASE.replace("2x3", "one-GPU"), CASE + "-graph"):
        assert grounding.Measured.of(record(case)) is None
    assert grounding.Measured.of(record(metric="forward bytes")) is None
    assert grounding.Measured.of(record(metric="forward s", ours=0.001)) == measured


def test_perfect_and_reversed_measurements() -> None:
    topology = cluster(3, between=1.0)
    cases = [CASE.replace("2x3", tile) for tile in ("1x6", "2x3", "6x1")]
    times = []
    for case in cases:
        measured = grounding.Measured.of(record(case))
        assert measured is not None
        time = grounding.predict(measured, {"p2p": topology})
        assert time is not None and grounding.predict(measured, {}) is None
        times.append(time)
    exact = [record(case, ours=time) for case, time in zip(cases, times, strict=True)]
    text = grounding.Comparison.of(exact, {"p2p": topology}).text()
    assert "Median absolute error 0.0% over 3 passes" in text and "3 of 3 pairs" in text
    wrong = [record(case, ours=1 / time) for case, time in zip(cases, times, strict=True)]
    assert grounding.Comparison.of(wrong, {"p2p": topology}).order == (0, 3)
    assert "no record" in grounding.Comparison.of([], {"p2p": topology}).text()


def test_faster_links_are_predicted_faster() -> None:
    measured = grounding.Measured.of(record())
    assert measured is not None

    def time(topology: Topology) -> float:
        found = grounding.predict(measured, {"p2p": topology})
        assert found is not None
        return found

    slow = cluster(6)
    assert time(replace(slow, inside=Link(1e6))) < time(slow)
