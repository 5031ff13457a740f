"""Draw the time line of a schedule of a deterministic backward pass.

One row a worker. In the terminal, a column is a piece of time: the digit or letter of the query tile that is
computed or added, a point while the worker waits for a turn, a blank when it has nothing left to do. With
--output the same as a picture, if matplotlib is installed: a colour a head, lighter for the computation
and darker for the addition, gaps for waiting.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshattn_kernels.dash import SCHEDULES, ScheduleTable, TileRanges, build_table, choose_schedule
from meshattn_kernels.dash.model import Costs, Deadlock, Timeline, simulate

PICTURES = (".png", ".pdf", ".svg", ".jpg")
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def summary(table: ScheduleTable, timeline: Timeline) -> str:
    """One line: the makespan against its bound, and what the critical path waits for."""
    path = timeline.critical_path()
    hops = sum(event.after >= 0 for event in path)
    return (
        f"{table.name}: makespan {timeline.makespan:.2f}, lower bound {timeline.lower_bound:.2f}, "
        f"ratio {timeline.ratio:.3f}; critical path of {len(path)} steps waits {hops} times for another "
        f"worker; runs on {table.min_workers} or more workers, "
        f"{'the same bits on any number' if table.invariant else 'other bits on another number'}"
    )


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """The time line as rows of at most ``width`` characters."""
    scale = width / timeline.makespan if timeline.makespan else 1.0
    lines = []
    for worker, events in enumerate(timeline.by_worker()):
        row = [" "] * width
        if events:
            row[: max(1, round(events[-1].end * scale))] = "." * max(1, round(events[-1].end * scale))
        for event in events:
            symbol = SYMBOLS[event.query % len(SYMBOLS)]
            for begin, end in ((event.start, event.ready), (event.begin, event.end)):
                first, last = round(begin * scale), round(end * scale)
                row[first : min(width, last)] = symbol * (min(width, last) - first)
        lines.append(f"{worker:4d} |{''.join(row[:width])}|")
    return "\n".join(lines)


def draw_picture(table: ScheduleTable, timeline: Timeline, path: str) -> None:
    """Write the time line as a picture. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(12, 1 + 0.3 * min(timeline.workers, 40)))
    colours: Any = plt.get_cmap("tab20")
    names = len(timeline.events) <= 400
    for event in timeline.events:
        dark, light = (colours((event.head % 10 * 2 + shade + 0.5) / 20) for shade in (0, 1))
        row = event.worker
        axes.barh(row, event.ready - event.start, left=event.start, height=0.9, color=light)
        axes.barh(row, event.end - event.begin, left=event.begin, height=0.9, color=dark)
        if names:
            middle = (event.start + event.ready) / 2
            axes.text(middle, event.worker, f"{event.kv}:{event.query}", ha="center", va="center", fontsize=6)
    axes.axvline(timeline.lower_bound, color="black", linestyle=":")
    title = summary(table, timeline).partition(";")[0]
    axes.set(xlabel="time (dotted: lower bound)", ylabel="worker", title=title)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _ranges(mask: str, kv_tiles: int, query_tiles: int, window: int | None) -> TileRanges:
    if mask == "full":
        return TileRanges.full(kv_tiles, query_tiles)
    causal = TileRanges.causal(kv_tiles, query_tiles)
    if window is None:
        return causal
    last = tuple(min(query_tiles, first + window) for first in causal.first)
    return TileRanges(causal.first, last, query_tiles)


def _number(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not 1 <= (value := int(text)) <= most:
            raise argparse.ArgumentTypeError(
                f"{value} is {'less than 1' if value < 1 else f'more than {most}'}"
            )
        return value

    return number


_LONGEST = 1e9  # times of tiles are numbers around 1
_MOST_BLOCKS = 2**20
_MOST_ROWS, _MOST_COLUMNS = 4096, 10_000  # of what is drawn


def _time(text: str) -> float:
    if not 0 <= (value := float(text)) <= _LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is no time: give 0 to {_LONGEST:g}")
    return value


def _share(text: str) -> float:
    if (value := _time(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is more than 1")
    return value


def _picture(text: str) -> str:
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{path.name} must end in one of {' '.join(PICTURES)}")
    return text


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, tiles = parser.add_argument, _number(_MOST_BLOCKS)
    add("--schedule", default="auto", choices=("auto", *SCHEDULES), help="the order; auto: what kernels take")
    add(
        "--mask",
        default="causal",
        choices=("full", "causal", "window"),
        help="who sees whom",
    )
    add("--window", type=tiles, help="query tiles that see a key/value tile, of --mask window")
    add("--kv-tiles", type=tiles, default=8, help="tiles of keys and values")
    add("--query-tiles", type=tiles, help="tiles of queries; None: as many as of keys")
    add("--heads", type=tiles, default=2, help="query heads")
    add("--kv-heads", type=tiles, help="key/value heads; None: as many as query heads")
    add(
        "--workers",
        type=_number(_MOST_ROWS),
        help="multiprocessors; None: as many as key/value tiles, at most 4096",
    )
    add(
        "--heads-in-flight",
        type=tiles,
        help="heads worked on at a time; None: 1, or as auto has it",
    )
    add("--split-heads", action="store_true", help="query heads of a group on several workers")
    add("--wave", type=tiles, help="jobs that a shift turns round together")
    add("--compute", type=_time, default=1.0, help="time of a tile")
    add("--reduce", type=_time, default=0.25, help="time of adding its dq, in turn")
    add("--latency", type=_time, default=0.0, help="time from one addition to the next worker's")
    add("--run-ahead", type=int, default=0, choices=(0, 1), help="tiles computed ahead of an addition")
    add("--jitter", type=_share, default=0.0, help="how much the times of tiles vary, as a share of them")
    add("--width", type=_number(_MOST_COLUMNS), default=100, help="columns of the text")
    add("--output", type=_picture, help="file of a picture")
    return parser


def main(arguments: Sequence[str] | None = None, prog: str = "python -m meshattn_kernels.dash.gantt") -> int:
    parser = _parser(prog)
    args = parser.parse_args(arguments)
    if (args.window is None) == (args.mask == "window"):
        parser.error("--window and --mask window belong together")
    if args.schedule == "auto" and (args.heads_in_flight or args.split_heads or args.wave):
        parser.error("auto chooses --heads-in-flight, --split-heads and --wave itself: name a --schedule")
    query_tiles = args.query_tiles or args.kv_tiles
    if args.heads * args.kv_tiles * query_tiles > _MOST_BLOCKS:
        parser.error(
            f"--heads {args.heads} with {args.kv_tiles} x {query_tiles} tiles are more than {_MOST_BLOCKS:,} "
            "blocks: draw fewer"
        )
    ranges = _ranges(args.mask, args.kv_tiles, query_tiles, args.window)
    kv_heads, workers = args.kv_heads or args.heads, args.workers or min(args.kv_tiles, _MOST_ROWS)
    if args.heads % kv_heads:
        parser.error(f"--kv-heads is {kv_heads}, but must divide the {args.heads} query heads of --heads")
    try:
        if args.schedule == "auto":
            table = choose_schedule(
                ranges, heads=args.heads, kv_heads=kv_heads, head_dim=128, workers=workers
            )
        else:
            table = build_table(
                args.schedule,
                ranges,
                heads=args.heads,
                kv_heads=kv_heads,
                workers=workers,
                heads_in_flight=args.heads_in_flight or 1,
                split_heads=args.split_heads,
                wave=args.wave,
            )
        costs = Costs(
            compute=args.compute,
            reduce=args.reduce,
            latency=args.latency,
            run_ahead=args.run_ahead,
            jitter=args.jitter,
        )
        timeline = simulate(table, costs)
    except (ValueError, Deadlock) as error:
        parser.error(str(error))
    print(draw_text(timeline, args.width))
    print(summary(table, timeline))
    if args.output:
        try:
            draw_picture(table, timeline, args.output)
        except ImportError:
            parser.error("--output takes matplotlib: pip install matplotlib")
        except OSError as error:
            parser.error(f"--output {args.output}: {error.strerror}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
