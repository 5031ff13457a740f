"""The command line: what a mesh would do, planned on any machine. Needs no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence

from meshattn import __version__
from meshattn.advice import NEAR, compare_layouts
from meshattn.command.arguments import add_window, check_head_dim, check_most, size, window_of
from meshattn.command.calibrate import add_calibrate, calibrate_command
from meshattn.command.plan import add_plan, plan_command
from meshattn.plan.assignment import Assignment, Tile, tiles
from meshattn.plan.cost import ITEMSIZES, CallShape, choose_tile, costs
from meshattn.plan.greedy import build
from meshattn.plan.report import DIRECTIONS, RATIOS, Row, describe_step, rows_at, worst_row

WIDEST_PICTURE = 48
MANY_BLOCKS = 2**13
MOST_OF_LAYOUTS = 1024  # some twenty seconds
MOST_RANKS = 4096
MOST_BLOCKS = 2**15  # of all lists of `meshattn schedule`, some ten seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit code. A wrong argument ends the process with code 2."""
    given = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    if given[:1] == ["gantt"]:
        try:
            from meshattn_kernels.dash.gantt import main as gantt
        except ImportError as error:
            parser.error(f"gantt draws what kernels do, and needs torch ({error})")
        return gantt(given[1:], prog="meshattn gantt")
    args, unknown = parser.parse_known_args(given)
    if unknown:  # said here, or argparse would show the usage of no command
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        said = COMMANDS[args.command](args)
        if said:
            print(said, flush=True)
    except ValueError as error:
        args.parser.error(str(error))
    except BrokenPipeError:  # `meshattn ... | head` has read enough; nothing may be flushed at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a file that cannot be read or written
        args.parser.error(str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshattn", description="Plan attention over a mesh of ranks.")
    parser.add_argument("--version", action="version", version=f"meshattn {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    plan = commands.add_parser(
        "plan",
        help="the best cut of a call on a cluster, and why",
        description="Candidates heads x a x b, best first, with time, traffic and memory on a cluster.",
    )
    add_plan(plan)
    _add_shape(plan)

    calibrate = commands.add_parser(
        "calibrate",
        help="measure the links and kernels of the ranks that torchrun starts",
        description="Measure a topology for `meshattn plan` by the library's own transports and kernels, on "
        "all ranks at once. Start it with torchrun.",
    )
    add_calibrate(calibrate)

    schedule = commands.add_parser(
        "schedule",
        help="how good the step lists are and what they move",
        description="Time of the step lists against bounds that no list can beat, steps, bytes and memory "
        "of a rank, for every tile of the ranks (the first is Ring-Attention).",
    )
    _add_mesh(schedule, tile_required=False)
    schedule.add_argument(
        "--ratio",
        type=float,
        nargs="+",
        metavar="R",
        help="block time / time of one query chunk on the link; one line for each, instead of the worst of "
        + " ".join(f"{r:g}" for r in RATIOS),
    )
    _add_shape(schedule)
    schedule.add_argument("--json", action="store_true", help="print JSON instead of a table")

    assignment = commands.add_parser(
        "assignment",
        help="who computes what, and the steps of one rank",
        description="The assignment matrix of a tile, its groups and the steps of one rank in chunk numbers.",
    )
    _add_mesh(assignment, tile_required=True)
    assignment.add_argument("--rank", type=int, default=0, help="whose steps to print (default 0)")
    _add_shape(assignment)

    commands.add_parser(  # its arguments are those of the kernels' own program
        "gantt",
        help="which worker of a GPU does what when in a deterministic backward pass (needs torch)",
        add_help=False,
    )

    layouts = commands.add_parser(
        "layouts",
        help="which layout suits a mask, and why",
        description="Layouts under a causal mask or a sliding window: what a rank sends, how full the tiles "
        "are that kernels compute, how even the ranks are.",
    )
    layouts.add_argument(
        "--ranks", type=int, required=True, metavar="P", help="ranks that share one sequence"
    )
    add_window(layouts)
    _add_shape(layouts)
    for each in (plan, calibrate, schedule, assignment, layouts):
        each.set_defaults(parser=each)  # whose usage is shown with what is wrong
    return parser


def _add_mesh(parser: argparse.ArgumentParser, *, tile_required: bool) -> None:
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="ranks that share one sequence")
    parser.add_argument(
        "--tile",
        required=tile_required,
        metavar="AxB",
        help="A query chunks by B key/value chunks per rank"
        + ("" if tile_required else " (default: all tiles)"),
    )


def _add_shape(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("call", "sizes of one attention call, for bytes, memory and costs")
    group.add_argument("--batch", type=int, default=1)
    group.add_argument(
        "--seq-len", type=size, default=131072, help="global sequence length, as 131072 or 128k (the default)"
    )
    group.add_argument("--heads", type=int, default=32, help="query heads (default 32)")
    group.add_argument("--kv-heads", type=int, help="key/value heads (default: as many as query heads)")
    group.add_argument("--head-dim", type=int, default=128, help="head size (default 128)")
    group.add_argument("--dtype", choices=ITEMSIZES, default="bf16", help="type of q, k, v (default bf16)")
    group.add_argument(
        "--reduce-dtype", choices=ITEMSIZES, help="type partials move in (default: fp32 or fp64)"
    )
    group.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)


def _shape(args: argparse.Namespace) -> CallShape:
    if not 1 <= args.ranks <= MOST_RANKS:
        raise ValueError(f"--ranks is {args.ranks}, but must be at least 1 and at most {MOST_RANKS}")
    check_most("batch", args.batch)
    check_most("seq-len", args.seq_len)
    check_most("heads", args.heads)
    check_head_dim(args.head_dim)
    exact = "fp64" if args.dtype == "fp64" else "fp32"
    if args.reduce_dtype not in (None, args.dtype, exact):
        other = "" if args.dtype == exact else f" or as {args.dtype}"
        raise ValueError(
            f"--reduce-dtype is {args.reduce_dtype}, but partial results of {args.dtype} move as {exact} "
            f"(the default){other}"
        )
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    if kv_heads < 1 or args.heads % kv_heads:
        raise ValueError(f"--kv-heads is {kv_heads}, but must divide the {args.heads} query heads")
    accumulate = max(ITEMSIZES[args.dtype], 4)
    return CallShape(
        batch=args.batch,
        rows=-(-args.seq_len // args.ranks),
        heads=args.heads,
        kv_heads=kv_heads,
        head_dim=args.head_dim,
        head_dim_v=args.head_dim,
        itemsize=ITEMSIZES[args.dtype],
        reduce_itemsize=accumulate if args.reduce_dtype is None else ITEMSIZES[args.reduce_dtype],
        acc_itemsize=accumulate,
        causal=args.causal,
    )


def _tile(args: argparse.Namespace) -> Tile:
    tile = Tile.parse(args.tile)
    if tile.ranks != args.ranks:
        fitting = ", ".join(map(str, tiles(args.ranks)))
        raise ValueError(
            f"--tile {tile} takes {tile.ranks} ranks, not {args.ranks}; tiles that fit: {fitting}"
        )
    return tile


def _schedule(args: argparse.Namespace) -> str:
    shape = _shape(args)
    chosen = choose_tile(args.ranks, shape)
    wanted = tiles(args.ranks) if args.tile is None else (_tile(args),)
    num_lists = len(wanted) * len(RATIOS if args.ratio is None else args.ratio)
    if args.ranks * num_lists > MOST_BLOCKS:
        raise ValueError(
            f"--ranks {args.ranks}: {num_lists} pairs of a tile and a ratio would take minutes; give --tile, "
            "and one --ratio for what is still too large, or see meshattn plan"
        )
    if args.ranks * num_lists > MANY_BLOCKS:
        print(f"making {4 * num_lists} lists of {args.ranks} blocks", file=sys.stderr, flush=True)
    if args.ratio is None:
        rows = [worst_row(tile, shape) for tile in wanted]
    else:
        for ratio in args.ratio:
            if not 1e-6 <= ratio <= 1e6:
                raise ValueError(f"--ratio {ratio:g} is not between 1e-6 and 1e6")
        rows = [row for tile in wanted for row in rows_at(tile, shape, args.ratio)]
    if args.json:
        return json.dumps([row.as_json() | {"chosen": row.tile == chosen} for row in rows], indent=2)
    what = "worst over the ratios" if args.ratio is None else "at each ratio"
    note = (
        f"fwd, bwd: time of the list over a bound that no list can beat ({what}), and in brackets over a "
        "closer one.\nshared: both axes of a rank share one link; axes: each has its own.\n"
        "ratio: block time / query chunk time. steps and MiB: forward, backward. "
        "* is the tile that auto takes."
    )
    return _table(rows, chosen) + "\n" + note


def _layouts(args: argparse.Namespace) -> str:
    left, right = window_of(args)
    shape = _shape(args)
    if args.ranks > MOST_OF_LAYOUTS:
        raise ValueError(
            f"--ranks is {args.ranks}, but layouts looks at every pair: give at most {MOST_OF_LAYOUTS}"
        )
    figures = compare_layouts(args.seq_len, args.ranks, shape, left, right)
    best, *others = figures
    lines = [
        f"take layout={best.layout!r}; time is that of the busiest rank of a nominal machine, and of layouts "
        f"within {100 * (NEAR - 1):.0f} % of the least the one that sends least is taken"
    ]
    lines += [f"  {each}, {each.time / best.time:.2f} times the time" for each in (best, *others)]
    return "\n".join(lines)


def _table(rows: Iterable[Row], chosen: Tile) -> str:
    head = [
        "tile",
        "ratio",
        "fwd shared",
        "fwd axes",
        "bwd shared",
        "bwd axes",
        "steps",
        "sent MiB",
        "peak MiB",
    ]
    lines = [head]
    for row in rows:
        figures = [f"{row.quality[key].plain:.3f} ({row.quality[key].tight:.3f})" for key in row.quality]
        lines.append(
            [
                f"{row.tile}{'*' if row.tile == chosen else ''}",
                "all" if row.ratio is None else f"{row.ratio:g}",
                *figures,
                " ".join(str(row.num_steps[d]) for d in DIRECTIONS),
                " ".join(f"{row.sent_bytes[d] / 2**20:.1f}" for d in DIRECTIONS),
                " ".join(f"{row.peak_bytes[d] / 2**20:.1f}" for d in DIRECTIONS),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def _assignment(args: argparse.Namespace) -> str:
    shape, tile = _shape(args), _tile(args)
    if not 0 <= args.rank < args.ranks:
        raise ValueError(f"--rank is {args.rank}, but ranks are 0 to {args.ranks - 1}")
    plan = Assignment(tile)
    rows = sorted({plan.row_group(i) for i in range(args.ranks)})
    cols = sorted({plan.col_group(i) for i in range(args.ranks)})
    parts = [
        f"tile {tile}: {tile.a} query chunks by {tile.b} key/value chunks on each of {args.ranks} ranks",
        plan.picture()
        if args.ranks <= WIDEST_PICTURE
        else f"(the matrix of {args.ranks} x {args.ranks} is too wide for a terminal)",
        "row rings, which share queries: " + "  ".join(" ".join(map(str, group)) for group in rows),
        "column rings, which share keys and values: "
        + "  ".join(" ".join(map(str, group)) for group in cols),
    ]
    for direction in DIRECTIONS:
        steps = build(direction, tile, costs(direction, shape)).steps
        lines = [f"{direction}, rank {args.rank}:"]
        lines += [f"  {n:>3}  {describe_step(step, plan, args.rank)}" for n, step in enumerate(steps)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _plan(args: argparse.Namespace) -> str:
    return plan_command(args, _shape(args))


COMMANDS = {
    "plan": _plan,
    "calibrate": calibrate_command,
    "schedule": _schedule,
    "assignment": _assignment,
    "layouts": _layouts,
}
