"""The pictures of the demo. Without matplotlib they are left out, and a line says so."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from meshattn.plan.assignment import Assignment, Tile

try:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
except ImportError:
    pyplot = None  # type: ignore[assignment]

COLORS = {"single": "#444444", "ring": "#d1662a", "mesh": "#1f6fb2"}


def can_draw(path: Path) -> bool:
    if pyplot is None:
        print(f"{path.name} is left out: matplotlib is not installed")
    return pyplot is not None


def draw_assignments(tiles: Mapping[str, Tile], path: Path) -> None:
    """Side by side, which rank computes which block; the blocks of rank 0 are framed."""
    if not can_draw(path):
        return
    figure, axes = pyplot.subplots(1, len(tiles), figsize=(3.6 * len(tiles), 4.1), squeeze=False)
    for axis, (name, tile) in zip(axes[0], tiles.items(), strict=True):
        matrix = Assignment(tile).matrix()
        colors = pyplot.get_cmap("Set2" if tile.ranks <= 8 else "tab20").resampled(tile.ranks)
        for query, row in enumerate(matrix):
            for key, rank in enumerate(row):
                edge = "black" if rank == 0 else "none"
                corner = (key - 0.45, query - 0.45)
                axis.add_patch(
                    Rectangle(corner, 0.9, 0.9, facecolor=colors(rank), edgecolor=edge, linewidth=2)
                )
                axis.text(key, query, str(rank), ha="center", va="center", fontsize=13)
        axis.set(xlim=(-0.5, tile.ranks - 0.5), ylim=(tile.ranks - 0.5, -0.5), aspect="equal")
        axis.set_title(f"{name}: tile {tile}", fontsize=12)
        axis.set_xlabel(f"key/value chunk\n\neach rank: {tile.a} x {tile.b} blocks")
        axis.set_ylabel("query chunk")
        axis.set_xticks(range(tile.ranks))
        axis.set_yticks(range(tile.ranks))
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    save(figure, path)


def draw_losses(
    losses: Mapping[str, Sequence[float]], differences: Mapping[str, Sequence[float]], path: Path
) -> None:
    """Losses by step above; below, how far each run is from the one on a single rank."""
    if not can_draw(path):
        return
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5.2), sharex=True, height_ratios=(3, 2))
    # The curves lie on each other; thinner ones go on top so that all can be seen.
    for width, (name, values) in zip((6.0, 3.2, 1.2), losses.items(), strict=True):
        above.plot(range(1, len(values) + 1), values, label=name, color=COLORS[name], linewidth=width)
    above.set_ylabel("loss, nats a byte")
    above.legend(frameon=False)
    for name, values in differences.items():
        # Equal losses have no place on a logarithmic axis.
        shown = [value or float("nan") for value in values]
        below.plot(range(1, len(values) + 1), shown, "o-", label=name, color=COLORS[name], markersize=3)
    below.set_yscale("log")
    below.set_ylabel("relative difference\nto single")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    save(figure, path)


def save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
