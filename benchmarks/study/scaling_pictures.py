"""The pictures of the scaling study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from meshattn.command.pictures import draw_timeline
from meshattn.plan.timeline import Timeline
from scaling import TOKENS, Figures
from study.scaling_rows import NAMES, Study

COLORS = {
    "ring": "#d1662a",
    "double ring": "#e3a857",
    "ulysses": "#8a6bb0",
    "usp": "#7a9e3f",
    "mesh": "#1f6fb2",
    "mesh+heads": "#12406b",
}
PANELS = [(cluster, heads) for cluster in ("dgx-h200", "a3-high") for heads in ("MHA", "GQA")]


def _panels(title: str) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(2, 2, figsize=(10.5, 7.6), sharex=True)
    figure.suptitle(title, fontsize=12)
    for axis, (cluster, heads) in zip(axes.flat, PANELS, strict=True):
        axis.set_title(f"{cluster}, {heads}", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    return figure, axes


def _finish(figure: Any, axes: Any, path: Path) -> None:
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=7, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


def _gpus(axis: Axes, cases: list[Mapping[str, Figures]]) -> None:
    ranks = [case["ring"].case.ranks for case in cases]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ranks, [str(n) for n in ranks])
    axis.set_xlabel("GPUs")


def _lines(axis: Axes, cases: list[Mapping[str, Figures]], value: Any) -> None:
    for method, color in COLORS.items():
        points = [(case["ring"].case.ranks, value(case[method])) for case in cases if method in case]
        if points:
            axis.plot(
                *zip(*points, strict=True), "o-", color=color, label=NAMES.get(method, method), markersize=3.5
            )


def draw_strong(study: Study, path: Path) -> None:
    """Time of a million tokens over the number of GPUs."""
    figure, axes = _panels("1M tokens, causal: forward and backward of one layer")
    for axis, (cluster, heads) in zip(axes.flat, PANELS, strict=True):
        cases = study.select(cluster=cluster, heads=heads, causal=True, seq_len=2**20, sm_share=0.0)
        cases = sorted(cases, key=lambda case: case["ring"].case.ranks)
        ideal = [
            (case["ring"].case.ranks, min(row.kernels_us for row in case.values()) / 1e3) for case in cases
        ]
        axis.plot(*zip(*ideal, strict=True), ":", color="#444444", label="kernels alone")
        _lines(axis, cases, lambda row: row.total_us / 1e3)
        axis.set_yscale("log")
        axis.set_ylabel("ms")
        _gpus(axis, cases)
    _finish(figure, axes, path)


def draw_weak(study: Study, path: Path) -> None:
    """Time over that of the kernels, with as many tokens for each GPU."""
    figure, axes = _panels(f"{TOKENS} tokens a GPU, causal: time over that of the kernels alone")
    for axis, (cluster, heads) in zip(axes.flat, PANELS, strict=True):
        cases = study.select(cluster=cluster, heads=heads, causal=True, sm_share=0.0)
        cases = [case for case in cases if case["ring"].case.seq_len == TOKENS * case["ring"].case.ranks]
        cases = sorted(cases, key=lambda case: case["ring"].case.ranks)
        _lines(axis, cases, lambda row: row.total_us / row.kernels_us)
        axis.set_ylabel("times")
        axis.set_ylim(bottom=0.9)
        _gpus(axis, cases)
    _finish(figure, axes, path)


def draw_two(timelines: Sequence[Timeline], path: Path) -> None:
    """Passes below each other, a few ranks of each."""
    draw_timeline(timelines, path, most_ranks=3)


def draw_bytes(study: Study, path: Path) -> None:
    """Of 256 GPUs and a million tokens: what a rank and the busiest card send, and what leaves all nodes."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.8))
    shown = {"rank": "sent by a rank, GiB", "card": "busiest card, GiB", "leaving": "leaving all nodes, GiB"}
    for axis, (field, title) in zip(axes, shown.items(), strict=True):
        for n, heads in enumerate(("MHA", "GQA")):
            (case,) = study.select(
                cluster="dgx-h200", heads=heads, causal=True, seq_len=2**20, ranks=256, sm_share=0.0
            )
            for place, (method, color) in enumerate(COLORS.items()):
                if method in case:
                    value = getattr(case[method], field) / 2**30
                    spot = 7 * n + place
                    axis.bar(spot, value, color=color, label=NAMES.get(method, method) if n == 0 else None)
                    label = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
                    axis.text(spot, value, label, ha="center", va="bottom", fontsize=6)
        axis.set_xticks([2.5, 9.5], ["MHA", "GQA"])
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("256 GPUs, 1M tokens, dgx-h200", fontsize=11)
    _finish(figure, axes, path)
