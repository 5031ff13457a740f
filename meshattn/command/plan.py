"""The command `meshattn plan`: the best cut of a call on a cluster, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

from meshattn.advice import priced_mask_of
from meshattn.command.arguments import add_window, check_folder, size, window_of
from meshattn.command.automatic import Taken, taken_by_auto, why_auto
from meshattn.command.progress import Progress
from meshattn.layouts import Layout, LayoutKind
from meshattn.plan.block_cost import Mask
from meshattn.plan.cost import CallShape
from meshattn.plan.coverage import coverage
from meshattn.plan.pace import pace_of
from meshattn.plan.passes import pass_script
from meshattn.plan.planner import BOTH, Question, plan
from meshattn.plan.prediction import Prediction, why
from meshattn.plan.timeline import Timeline, run
from meshattn.plan.topology import load_topology, presets
from meshattn.plan.trace import write_trace

MOST_APART = 1024  # ranks that do not fill their nodes: a quarter of a minute
MANY_MASKED = 256  # five seconds to half a minute
MOST_DOCUMENTS = 2**21  # times ranks, some ten seconds


def add_plan(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command beside those of the call."""
    parser.add_argument("--ranks", type=int, required=True, metavar="P", help="ranks that share one sequence")
    parser.add_argument(
        "--topology",
        required=True,
        metavar="FILE",
        help=f"a file, see docs/planning.md, or one of {', '.join(presets())}",
    )
    parser.add_argument("--heads-axis", type=int, metavar="W", help="only cuts with W ranks of the head axis")
    parser.add_argument("--memory", type=size, metavar="BYTES", help="cap on the peak of a rank, as 8G")
    parser.add_argument("--layout", choices=get_args(LayoutKind), default="striped", help="default striped")
    add_window(parser)
    parser.add_argument(
        "--documents",
        type=size,
        nargs="+",
        metavar="LEN",
        help="lengths of packed documents; the last repeats until the sequence is full",
    )
    parser.add_argument("--forward", action="store_true", help="the forward alone, as for inference")
    parser.add_argument("--show", type=int, default=8, metavar="N", help="candidates to print (default 8)")
    parser.add_argument(
        "--placements",
        action="store_true",
        help="a line for every placement of a cut, not for the best alone",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the assignment matrix of the best")
    parser.add_argument(
        "--timeline", type=Path, metavar="PNG", help="draw what the ranks of the best do when"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="the same for Perfetto or chrome://tracing"
    )


def plan_command(args: argparse.Namespace, shape: CallShape) -> str:
    """What the command prints; ValueError for what cannot be planned."""
    if args.show < 1:
        raise ValueError(f"--show is {args.show}, but must be at least 1")
    for name in ("picture", "timeline", "trace"):
        check_folder(name, getattr(args, name))
    if args.picture or args.timeline:
        from meshattn.command.pictures import check_picture

        check_picture("picture", args.picture)
        check_picture("timeline", args.timeline)
    topology = load_topology(args.topology)
    nodes, more = divmod(args.ranks, topology.gpus_per_node)
    if args.ranks > MOST_APART and nodes and more:
        fewer = args.ranks - more
        raise ValueError(
            f"--ranks {args.ranks} do not fill nodes of {topology.gpus_per_node}, so that each would have to "
            f"be followed: give {fewer} or {fewer + topology.gpus_per_node}, which do"
            + (f", or at most {MOST_APART}" if fewer > MOST_APART else "")
        )
    say = Progress("plan")
    question = Question(args.ranks, shape, topology, BOTH[:1] if args.forward else BOTH, _mask(args, shape))
    found = plan(
        question,
        heads=args.heads_axis,
        memory_limit=args.memory,
        at_least=args.show,
        placements=args.placements,
        say=say,
    )
    best = found[0]
    if args.picture or args.timeline:
        from meshattn.command.pictures import draw_assignment, draw_timeline

        if args.picture:
            draw_assignment(best.cut.tile, args.picture)
        if args.timeline:
            draw_timeline(_recorded(question, best), args.timeline)
    if args.trace:
        write_trace(_recorded(question, best), args.trace)
    shown = [each for n, each in enumerate(found) if n < args.show or each.is_ring or each.is_ulysses]
    say('what "auto" takes')
    taken = taken_by_auto(question, args.seq_len, args.heads_axis)
    outside = coverage(question, [*shown, *(each.prediction for each in taken)], args.dtype)
    if args.json:
        said: dict[str, object] = {
            "why": why(found),
            "extrapolated": outside.lacking,
            "to_measure": outside.command.strip(),
        }
        said["candidates"] = [each.as_json() for each in shown]
        said["auto"] = [each.as_json() for each in taken]
        return json.dumps(said, indent=2)
    reason = f"{why(found)}.{_absent(question, found)}"
    measured = outside.text(topology.kernels.describe())
    parts = [
        _table([HEAD, *_lines(shown, taken)]),
        reason,
        why_auto(best, taken, masked=question.mask is not None),
        _code(best, args.topology),
        measured,
        NOTE,
    ]
    return "\n\n".join(filter(None, parts))


def _mask(args: argparse.Namespace, shape: CallShape) -> Callable[[int], Mask] | None:
    """None where all blocks cost the same."""
    left, right = window_of(args)
    documents: list[int] = args.documents or []
    if documents and min(documents) < 1:
        raise ValueError(f"--documents has {min(documents)}, but must be at least 1")
    if left is None and not right and not documents and args.layout == "striped":
        return None
    if args.ranks > MANY_MASKED:
        raise ValueError(
            f"--ranks is {args.ranks}, but with a window, documents or a layout every block has its cost, "
            f"and at most {MANY_MASKED} ranks can be planned"
        )
    missing = args.seq_len - sum(documents)
    if documents and len(documents) + max(missing, 0) // documents[-1] > MOST_DOCUMENTS // args.ranks:
        raise ValueError(
            f"--documents {documents[-1]} of --seq-len {args.seq_len}: on {args.ranks} ranks, at most "
            f"{MOST_DOCUMENTS // args.ranks} documents can be planned: give longer ones or fewer tokens"
        )
    while documents and sum(documents) < args.seq_len:
        missing = args.seq_len - sum(documents)
        documents = [*documents, *[documents[-1]] * (missing // documents[-1]), missing % documents[-1]]

    @cache
    def mask(heads: int) -> Mask:
        cut = Layout(args.layout, args.seq_len, args.ranks // heads, heads * shape.rows)
        return priced_mask_of(cut, left, right, documents)

    return mask


def _absent(question: Question, found: Sequence[Prediction]) -> str:
    """Why a known method is not in the table."""
    ranks, heads = question.ranks, question.shape.heads
    said = "" if any(each.is_ring for each in found) else " Plain ring is left out by the limits given."
    if ranks == 1 or any(each.is_ulysses for each in found):
        return said
    if heads % ranks:
        return f"{said} Ulysses alone cannot be: {ranks} ranks cannot share {heads} heads."
    return f"{said} Ulysses alone is left out by the limits given."


def _code(best: Prediction, topology: str) -> str:
    """How to build the first line."""
    sizes = f'heads={best.cut.heads}, tile="{best.cut.tile}"'
    if best.group == tuple(range(best.cut.ranks)):
        return f'mesh = ma.init_attention_mesh({sizes}, topology="{topology}")'
    order = ", ".join(f'"{axis}"' for axis in best.order if best.cut.size(axis) > 1)
    return (
        f"group = ma.rank_order({sizes}, order=({order}))  # ranks numbered node by node\n"
        f'mesh = ma.init_attention_mesh(group, {sizes}, topology="{topology}")'
    )


NOTE = """\
cut: ranks by heads x query chunks x key/value chunks of a rank. total: forward and backward together unless
--forward; it is kernels (blocks alone), other (merges, copies, what exchanges take from kernels) and exposed
(the busiest rank computes nothing). sent: by a rank; card: out of the busiest network card; leaving: out of
all nodes. peak: buffers of a rank beside arguments and results, and what the kernel keeps for itself."""


def _recorded(question: Question, best: Prediction) -> list[Timeline]:
    pace = pace_of(question.topology, best.cut, best.order)
    return [
        run(
            pass_script(
                direction,
                question.shape,
                best.cut,
                question.topology,
                order=best.order,
                mask=None if question.mask is None else question.mask(best.cut.heads),
                pace=pace,
            ),
            question.topology,
            record=True,
        )
        for direction in question.passes
    ]


HEAD = [
    "cut", "total ms", "kernels", "other", "exposed", "sent MiB", "card MiB", "leaving GiB", "exchanges",
    "peak MiB", "limit", "placement", "taken by",
]  # fmt: skip


def _cells(each: Prediction) -> list[str]:
    links = each.links
    return [
        each.name,
        *(f"{us / 1e3:.2f}" for us in (each.total_us, each.kernels_us, each.other_us, each.exposed_us)),
        f"{links.rank / 2**20:.0f}",
        f"{links.card / 2**20:.0f}",
        f"{links.leaving / 2**30:.1f}",
        str(each.exchanges),
        f"{each.memory / 2**20:.0f}",
        each.limit,
        each.where,
    ]


def _lines(shown: Sequence[Prediction], taken: Sequence[Taken]) -> list[list[str]]:
    """A line for each that differs, with all ways to get it."""
    lines: dict[tuple[str, ...], list[str]] = {tuple(_cells(each)): [] for each in shown}
    for each in taken:
        lines.setdefault(tuple(_cells(each.prediction)), []).append(each.by)
    return [[*cells, "; ".join(ways)] for cells, ways in lines.items()]


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [HEAD.index(name) for name in ("cut", "limit", "placement", "taken by")]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
