"""Pictures of plans, with the optional matplotlib: the assignment matrix, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshattn.plan.assignment import Assignment, Tile
from meshattn.plan.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_NUMBERS = 32
COLORS = {"block": "#1f6fb2", "compute": "#8fb8d8", "node": "#7a9e3f", "net": "#d1662a"}
WORDS = {
    "block": "blocks",
    "compute": "merges and copies",
    "node": "exchanges inside the node",
    "net": "exchanges between nodes",
}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures take matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_picture(name: str, path: Path | None) -> None:
    """Before the work, so that it is not lost: ValueError for an ending that is none of a picture, and where
    matplotlib is missing. ``name`` is that of the option."""
    if path is None:
        return
    _pyplot()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--{name} {path}: the ending must be one of {', '.join(sorted(known))}")


def draw_assignment(tile: Tile, path: Path) -> None:
    """Which rank computes which block; the blocks of rank 0 are framed in black.

    Raises ValueError where matplotlib is missing.
    """
    pyplot = _pyplot()
    from matplotlib.patches import Rectangle

    ranks = tile.ranks
    plan = Assignment(tile)
    figure, axis = pyplot.subplots(figsize=(5.6, 6.0))
    name = "Set2" if ranks <= 8 else "tab20" if ranks <= 20 else "turbo"
    colors = pyplot.get_cmap(name).resampled(ranks)
    axis.imshow(plan.matrix(), cmap=colors, vmin=-0.5, vmax=ranks - 0.5, interpolation="nearest")
    for query, key in ((p, q) for p in plan.queries(0) for q in plan.keys(0)):
        axis.add_patch(
            Rectangle((key - 0.5, query - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.4)
        )
    if ranks <= MOST_NUMBERS:
        size = 13 if ranks <= 10 else 6
        for query in range(ranks):
            for key, rank in enumerate(plan.matrix_row(query)):
                axis.text(key, query, str(rank), ha="center", va="center", fontsize=size)
    axis.set_title(f"tile {tile}: each rank {tile.a} x {tile.b} blocks", fontsize=12)
    axis.set_xlabel("key/value chunk")
    axis.set_ylabel("query chunk")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    _save(pyplot, figure, path)


def draw_timeline(timelines: Sequence[Timeline], path: Path, *, most_ranks: int = 8) -> None:
    """Recorded passes one below the other, up to ``most_ranks`` ranks each, one of each kind.

    Raises ValueError where matplotlib is missing.
    """
    pyplot = _pyplot()
    from matplotlib.patches import Patch

    shown = [timeline.ranks_by_kind[:most_ranks] for timeline in timelines]
    heights = [max(2, len(ranks)) for ranks in shown]
    figure, axes = pyplot.subplots(
        len(timelines), 1, figsize=(11, 1.2 + 0.55 * sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, timeline, ranks in zip(axes[:, 0], timelines, shown, strict=True):
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for event in timeline.events:
            if event.rank in ranks:
                color = "block" if event.name.startswith("block") else event.lane
                lane = ("compute", "node", "net").index(event.lane)
                place = 3 * ranks.index(event.rank) + lane
                bars.setdefault((place, color), []).append(
                    (event.begin / 1e3, (event.end - event.begin) / 1e3)
                )
        for (place, color), spans in bars.items():
            axis.broken_barh(
                spans, (place - 0.42, 0.84), facecolors=COLORS[color], edgecolor="white", linewidth=0.15
            )
        axis.set_yticks([3 * n + 1 for n in range(len(ranks))], [f"rank {rank}" for rank in ranks])
        axis.set_ylim(3 * len(ranks) - 0.4, -0.6)
        axis.set_xlim(0, timeline.total_us / 1e3)
        axis.set_title(
            f"{timeline.script.name}: {timeline.total_us / 1e3:.1f} ms, "
            f"{timeline.exposed_us / 1e3:.1f} ms without compute",
            fontsize=10,
            loc="left",
        )
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms")
    used = [Patch(color=COLORS[name], label=words) for name, words in WORDS.items()]
    figure.legend(handles=used, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
