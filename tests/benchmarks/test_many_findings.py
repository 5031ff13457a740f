"""What many GPUs have shown: predictions beside the tables, and the figures that were wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from across_ranks import many_steps
from across_ranks.many_findings import comparisons, marks, predictions
from meshattn.plan.topology import load_topology

SCALES = {name: many_steps.scale_of(4, gpus) for name, gpus in (("real", 4), ("shared", 1), ("cpu", 0))}
STEPS = "self-test", "tables", "slow-links"
CASE = "B1-S{}-H32-H_kv8-D128-bfloat16-causal-striped-P4-{}"


def _write(folder: Path, figures: Mapping[tuple[str, str], tuple[float, float | None]]) -> None:
    """Figures and ratios, by case and metric; and other ratios, to a GPU with its links awake."""
    folder.mkdir()
    lines = [
        json.dumps(
            {"case": case, "metric": metric, "ours": ours, "peer": peer, "ratio": ratio and ratio + more}
        )
        for (case, metric), (ours, ratio) in figures.items()
        for peer, more in (("one GPU", 0.0), ("one GPU awake", 0.02))[: 2 if ratio else 1]
    ]
    (folder / "x.jsonl").write_text("\n".join(lines))


def test_passes_over_nccl_are_predicted_from_links_that_were_measured(tmp_path: Path) -> None:
    def predicted(scale: str) -> str:
        return predictions(comparisons(tmp_path, SCALES[scale]), tmp_path)

    names = [CASE.format(8192, f"2x2-{transport}") for transport in ("symmetric", "p2p")]
    _write(tmp_path / "tables", {(name, "forward ms"): (1.5, None) for name in names})
    text = predicted("real")
    assert "preset" in text and "-symmetric forward" in text and "-p2p forward" not in text
    assert not predicted("shared"), "no preset knows shared GPUs"
    (tmp_path / many_steps.TOPOLOGY).write_text(load_topology("dgx-h200").text())
    text = predicted("real")
    assert "preset" not in text and "-symmetric forward" in text and "-p2p forward" not in text
    assert "-p2p forward" in predicted("cpu"), "where nothing else was measured"
    (tmp_path / many_steps.SOCKETS).write_text(load_topology("a3-high").text())
    assert "-p2p forward" in predicted("real")


def test_what_was_to_be_shown_stands_beside_what_was_found(tmp_path: Path) -> None:
    scaled = {
        (CASE.format(length, cut), "both TFLOP/s per rank"): (500.0, ratio)
        for length, ratios in ((32768, (0.9, 0.91, 0.99)), (131072, (0.961, 0.984, 0.5)))
        for cut, ratio in zip(("1x4-symmetric", "2x2-symmetric", "2x2-p2p"), ratios, strict=True)
    }
    _write(tmp_path / "tables", scaled)
    parts = {
        ("2x2", "forward"): (0.84, 0.839),
        ("4x1", "forward"): (1.6, 1.516),
        ("4x1", "backward"): (0.6, 0.677),
    }
    slow = {
        (CASE.format(4096, f"{tile}-p2p"), f"{direction} {what} of ring's"): (part, part)
        for (tile, direction), both in parts.items()
        for what, part in zip(("time", "bytes"), both, strict=True)
    }
    _write(tmp_path / "slow-links", slow)
    _write(tmp_path / "self-test", {("P4", "wrong cases"): (2, None), ("P4", "meshes left"): (3, None)})

    def told(scale: str, steps: Sequence[str] = STEPS) -> list[list[str]]:
        lines = marks(tmp_path, SCALES[scale], {}, steps).splitlines()[2:]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]

    beyond = ["slow links: time of ring's beyond bytes of ring's", "within 10%", "-11.4% (4x1 backward)"]
    wrong = ["self-test: wrong cases", "0", "2, but 3 meshes were not tested"]
    share = "tokens: fastest cut / one GPU, copy engines"
    assert told("real") == [
        wrong,
        [f"32,768 {share}", "", "0.910 (2x2; 1x4 0.900)"],
        [f"131,072 {share}", "0.97", "0.984 (2x2; 1x4 0.961)"],
        beyond,
    ]
    assert told("shared") == [wrong, beyond]
    assert told("real", ["self-test"]) == [wrong] and told("real", ["slow-links"]) == [beyond], (
        "not of others"
    )
    assert not told("real", [])


def test_nothing_is_told_of_what_did_not_run(tmp_path: Path) -> None:
    assert not marks(tmp_path, SCALES["real"], comparisons(tmp_path, SCALES["real"]), STEPS)
