"""The command `meshattn calibrate`: a topology measured on the ranks that torchrun starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from meshattn.command.arguments import check_folder, check_head_dim, check_most, size
from meshattn.plan.cost import ITEMSIZES


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
    parser.add_argument(
        "--block",
        type=size,
        nargs=3,
        action="append",
        default=[],
        metavar=("ROWS", "HEADS", "KV_HEADS"),
        help="one more block; without --rows those given so alone, as `meshattn plan` asks for them",
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

    from meshattn.command.measure import calibrate, join, leaving, sizes_of

    if os.environ.get("RANK", "0") == "0":  # no other rank writes
        check_folder("out", args.out)
    kv_heads = args.kv_heads or args.heads
    if len(kv_heads) != len(args.heads):
        raise ValueError(
            f"--kv-heads has {len(kv_heads)} numbers, but must have one for each of the {len(args.heads)} of "
            "--heads"
        )
    heads = tuple(zip(args.heads, kv_heads, strict=True))
    for number, shared in heads:
        check_most("heads", number)
        if min(number, shared) < 1 or number % shared:
            raise ValueError(f"--kv-heads has {shared} for {number} of --heads, but must divide them")
    for rows, number, shared in args.block:
        check_most("rows", rows, "block ROWS")
        check_most("heads", number, "block HEADS")
        if shared < 1 or number % shared:
            raise ValueError(
                f"--block {rows} {number} {shared}: the {shared} key/value heads must divide the "
                f"{number} query heads"
            )
    check_head_dim(args.head_dim)
    for rows in args.rows:
        check_most("rows", rows)
    if args.messages and not 0 < args.messages[0] < args.messages[1]:
        raise ValueError(
            f"--messages is {args.messages[0]} {args.messages[1]}, but the second must be larger"
        )
    device = join()
    with leaving(dist.destroy_process_group, device):
        blocks = [(rows, number, shared) for rows, number, shared in args.block]
        sizes = sizes_of(device, args.rows, heads, args.head_dim, args.dtype, args.messages, blocks)
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
