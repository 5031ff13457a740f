"""The command `meshattn plan`: the best cut of a call on a cluster, and why."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from meshattn.plan.cost import HEAD_DIM_STEP, ITEMSIZES, CallShape
from meshattn.plan.coverage import coverage
from meshattn.plan.planner import BOTH, Question, plan
from meshattn.plan.prediction import Prediction, why
from meshattn.plan.script import pace_of, pass_script
from meshattn.plan.timeline import Timeline, run
from meshattn.plan.topology import load_topology, presets
from meshattn.plan.trace import write_trace

MANY_RANKS = 512  # of which each is emulated
UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def size(text: str) -> int:
    """A number, or one with K, M or G behind it: 128k is 131072."""
    unit = text[-1:].lower()
    number, unit = (text[:-1], unit) if unit in UNITS and unit else (text, "")
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 131072, 128k or 1M") from None
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


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
    parser.add_argument("--memory", type=size, metavar="BYTES", help="cap on the buffers of a rank, as 8G")
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
        _check_folder(name, getattr(args, name))
    topology = load_topology(args.topology)
    if args.ranks > MANY_RANKS and args.ranks % topology.gpus_per_node:
        print(
            f"emulating each of {args.ranks} ranks: they do not fill their nodes", file=sys.stderr, flush=True
        )
    question = Question(args.ranks, shape, topology, BOTH[:1] if args.forward else BOTH)
    found = plan(
        question,
        heads=args.heads_axis,
        memory_limit=args.memory,
        at_least=args.show,
        placements=args.placements,
    )
    best = found[0]
    if args.picture or args.timeline:
        from meshattn.pictures import draw_assignment, draw_timeline

        if args.picture:
            draw_assignment(best.cut.tile, args.picture)
        if args.timeline:
            draw_timeline(_recorded(question, best), args.timeline)
    if args.trace:
        write_trace(_recorded(question, best), args.trace)
    shown = [each for n, each in enumerate(found) if n < args.show or each.is_ring or each.is_ulysses]
    outside = coverage(question, shown, args.dtype)
    if args.json:
        said = {"why": why(found), "extrapolated": outside.lacking, "to_measure": outside.command.strip()}
        return json.dumps({**said, "candidates": [each.as_json() for each in shown]}, indent=2)
    reason = f"{why(found)}.{_absent(question, found)}"
    measured = outside.text(topology.kernels.describe())
    parts = [_table(shown), reason, _code(best, args.topology), measured, NOTE]
    return "\n\n".join(filter(None, parts))


def check_head_dim(head_dim: int) -> None:
    """ValueError for one that attention does not take."""
    if head_dim < 1 or head_dim % HEAD_DIM_STEP:
        raise ValueError(f"--head-dim is {head_dim}, but must be a multiple of {HEAD_DIM_STEP}")


def _check_folder(name: str, path: Path | None) -> None:
    """Before the work, so that it is not lost."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--{name} {path}: there is no folder {path.parent}")


def _absent(question: Question, found: Sequence[Prediction]) -> str:
    """Why a known method is not in the table."""
    ranks, heads = question.ranks, question.shape.heads
    if ranks == 1 or any(each.is_ulysses for each in found):
        return ""
    if heads % ranks:
        return f" Ulysses alone cannot be: {ranks} ranks cannot share {heads} heads."
    return " Ulysses alone is left out by the limits given."


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


NOTE = (
    "cut: ranks by heads x query chunks x key/value chunks of a rank. total: forward and backward together "
    "unless --forward;\nkernels: blocks alone; exposed: the busiest rank computes nothing. sent: by a rank; "
    "card: out of the busiest network card;\nleaving: out of all nodes. peak: buffers of a rank beside "
    "arguments and results."
)


def _recorded(question: Question, best: Prediction) -> list[Timeline]:
    pace = pace_of(question.topology, best.cut, best.order)
    return [
        run(
            pass_script(direction, question.shape, best.cut, question.topology, order=best.order, pace=pace),
            question.topology,
            record=True,
        )
        for direction in question.passes
    ]


def _table(found: Sequence[Prediction]) -> str:
    head = [
        "cut", "total ms", "kernels", "exposed", "sent MiB", "card MiB", "leaving GiB", "exchanges",
        "peak MiB", "limit", "placement",
    ]  # fmt: skip
    lines = [head]
    for each in found:
        links = each.links
        lines.append(
            [
                each.name,
                f"{each.total_us / 1e3:.2f}",
                f"{each.kernels_us / 1e3:.2f}",
                f"{each.exposed_us / 1e3:.2f}",
                f"{links.rank / 2**20:.0f}",
                f"{links.card / 2**20:.0f}",
                f"{links.leaving / 2**30:.1f}",
                str(each.exchanges),
                f"{each.memory / 2**20:.0f}",
                each.limit,
                each.where,
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = (0, 9, 10)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command that measures a topology."""
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the topology goes")
    parser.add_argument("--name", default="measured", help="what it is called")
    parser.add_argument(
        "--rows",
        type=size,
        nargs="+",
        default=[],
        help="of the blocks that are timed: tokens a rank of your runs, and a few times as many",
    )
    parser.add_argument(
        "--heads",
        type=int,
        nargs="+",
        default=[8, 2],
        help="of the blocks: all that a model has, and what a head axis leaves of them (default 8 2)",
    )
    parser.add_argument(
        "--kv-heads", type=int, nargs="+", help="of each of --heads, in their order (default: as many)"
    )
    parser.add_argument("--head-dim", type=int, default=128, help="head size (default 128)")
    parser.add_argument(
        "--dtype", choices=ITEMSIZES, help="type of q, k, v (default bf16 on GPUs, fp32 on CPUs)"
    )
    parser.add_argument(
        "--transport", default="auto", help="auto, symmetric or p2p, as of a mesh (default auto)"
    )
    parser.add_argument("--per-node", type=int, help="ranks of a node, where nodes are parts of one machine")
    parser.add_argument("--kernel", help="local kernel by name (default: what the library chooses)")
    parser.add_argument(
        "--messages",
        type=size,
        nargs=2,
        metavar=("SMALL", "LARGE"),
        help="bytes that links are measured with (default 64k 64M on GPUs, 16k 2M on CPUs): less for slow "
        "links",
    )


def calibrate_command(args: argparse.Namespace) -> str:
    """Measure, and write the file on rank 0."""
    import torch.distributed as dist

    from meshattn.calibrate import calibrate, join, sizes_of

    if os.environ.get("RANK", "0") == "0":  # no other rank writes
        _check_folder("out", args.out)
    kv_heads = args.kv_heads or args.heads
    if len(kv_heads) != len(args.heads):
        raise ValueError(
            f"--kv-heads has {len(kv_heads)} numbers, but must have one for each of the {len(args.heads)} of "
            "--heads"
        )
    heads = tuple(zip(args.heads, kv_heads, strict=True))
    for number, shared in heads:
        if min(number, shared) < 1 or number % shared:
            raise ValueError(f"--kv-heads has {shared} for {number} of --heads, but must divide them")
    check_head_dim(args.head_dim)
    if args.rows and min(args.rows) < 1:
        raise ValueError(f"--rows has {min(args.rows)}, but must be at least 1")
    if args.messages and not 0 < args.messages[0] < args.messages[1]:
        raise ValueError(
            f"--messages is {args.messages[0]} {args.messages[1]}, but the second must be larger"
        )
    device = join()
    sizes = sizes_of(device, args.rows, heads, args.head_dim, args.dtype, args.messages)
    topology = calibrate(
        sizes,
        device,
        name=args.name,
        per_node=args.per_node,
        transport=args.transport,
        kernel=args.kernel,
    )
    first = dist.get_rank() == 0
    if first:
        args.out.write_text(topology.text())
    dist.barrier()
    dist.destroy_process_group()
    if not first:
        return ""
    inside, between = topology.inside, topology.between
    across = "none between nodes, as there is one: plan no more ranks than it has"
    if between is not None:
        across = f"between nodes {between.gb_per_s:.3g} GB/s and {between.latency_us:.0f} us"
    return (
        f"written to {args.out}: {topology.gpus_per_node} ranks a node; links inside a node "
        f"{inside.gb_per_s:.3g} GB/s and {inside.latency_us:.0f} us, {across}; "
        f"{len(topology.kernels.blocks)} blocks of kernel {topology.kernels.kernel}"
    )
