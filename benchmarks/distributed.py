"""Ring-Attention and mesh tiles on the ranks that there are: time, what transfers add to it, bytes.

    python benchmarks/distributed.py                      four gloo ranks, or one rank a GPU
    torchrun --nproc-per-node 2 benchmarks/distributed.py --seq-len 8192 16384 --heads 16 --head-dim 128 \\
        --dtype bfloat16 --transport symmetric p2p --one-gpu --torch cudnn flash

First checks every tile on every transport against dense attention in float64 on a short sequence. Then all
take turns (see rank_turns.py), among them each tile without its transfers: what a transport adds to that is
exposed communication.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from across_ranks.rank_check import Wrong, check, oracle
from across_ranks.rank_contenders import (
    Awake,
    Captured,
    Case,
    Contender,
    Ours,
    TorchContextParallel,
    alone,
    ours_by_transport,
)
from across_ranks.rank_cuts import DIRECTIONS, chosen_cuts, formula_bytes, name_of
from across_ranks.rank_memory import memory_of
from across_ranks.rank_report import Result, table_of, write_report
from across_ranks.rank_start import join, start_ranks
from across_ranks.rank_turns import Turn, in_turns
from harness import REPORTS
from meshattn.plan.placement import Cut
from meshattn.plan.topology import load_topology

BEGAN = time.monotonic()


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if "RANK" not in os.environ:
        start_ranks(options.ranks)
    device = join(options.timeout)
    kernel = options.kernel
    results: list[Result] = []

    def keep(*unfinished: Result) -> Path:
        return write_report([*results, *unfinished], Path(options.out), options.commit)

    for seq_len in options.seq_len:
        case = Case(
            seq_len=seq_len,
            batch=options.batch_size,
            heads=options.heads,
            kv_heads=options.kv_heads or options.heads,
            head_dim=options.head_dim,
            dtype=getattr(torch, options.dtype),
            causal=not options.full,
            layout=options.layout,
            kernel=kernel,
        )
        results.append(_measure(case, options, device, keep))
        if dist.get_rank() == 0:
            print(table_of(results[-1]), flush=True)
            print(f"written to {keep()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # Torch's may be missing; ours must not.
    return int(any(not name.startswith("torch") for found in results for name in found.absent))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="ranks to start without torchrun (default: GPUs, else 4)")
    parser.add_argument("--seq-len", type=int, nargs="+", default=[4096], help="of all ranks together")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--layout", choices=("striped", "zigzag", "contiguous"), default="striped")
    parser.add_argument("--kernel", help="local kernel by name (default: what the library chooses)")
    parser.add_argument(
        "--tile", nargs="+", default=[], help="AxB, WxAxB with a head axis of W, or auto (default: all tiles)"
    )
    parser.add_argument(
        "--head-axis", action="store_true", help="without --tile: all tiles with every head axis, too"
    )
    parser.add_argument(
        "--head-groups", type=int, nargs="+", default=[], help="beside auto, on tiles with a head axis"
    )
    parser.add_argument(
        "--topology", help="what --tile auto plans for, a head axis too (default: fewest bytes)"
    )
    parser.add_argument(
        "--transport",
        nargs="+",
        default=["p2p"],
        choices=("auto", "symmetric", "p2p", "plain"),
        help="plain: send and receive as PyTorch gives them",
    )
    parser.add_argument("--no-bare", action="store_true", help="leave out the tiles without their transfers")
    parser.add_argument(
        "--graph",
        nargs="*",
        choices=("symmetric", "p2p", "plain"),
        help="on these transports, and without transfers and on one GPU: our passes as CUDA graphs, too",
    )
    parser.add_argument("--one-gpu", action="store_true", help="also one rank alone with as much work")
    parser.add_argument(
        "--awake",
        action="store_true",
        help="what moves nothing also with the links between GPUs kept awake (needs symmetric, too)",
    )
    parser.add_argument("--torch", nargs="+", default=[], choices=("cudnn", "flash"), help="torch's own")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-ms", type=float, default=60.0, help="about how long a turn runs")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a rank waits for another")
    parser.add_argument("--out", default=str(REPORTS), help="folder of the report")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or min(options.seq_len) < 1:
        parser.error(f"--rounds is {options.rounds}, --seq-len {options.seq_len}; all must be at least 1")
    if options.head_axis and options.tile:
        parser.error("--head-axis is for all tiles: name those with a head axis as WxAxB in --tile")
    if options.topology and "auto" not in options.tile:
        parser.error("--topology is what auto plans for: add --tile auto")
    if options.awake and "symmetric" not in options.transport:
        parser.error("--awake keeps links awake by copy engines: add --transport symmetric")
    if missing := set(options.graph or ()) - set(options.transport):
        parser.error(f"--graph {' '.join(sorted(missing))}: name it in --transport, too")
    return options


def _measure(
    case: Case, options: argparse.Namespace, device: torch.device, keep: Callable[[Result], Path]
) -> Result:
    """``keep`` gets on rank 0 what there is behind every round: one that takes long may be stopped."""
    ranks = dist.get_world_size()
    shape = case.shape(-(-case.seq_len // ranks))
    topology = load_topology(options.topology) if options.topology else None
    chosen = chosen_cuts(options.tile, ranks, shape, topology, head_axis=options.head_axis)
    if options.head_groups and all(cut.heads == 1 for cut in chosen):
        raise ValueError("--head-groups: no cut has a head axis; give --head-axis, or WxAxB in --tile")
    if options.graph is not None and device.type != "cuda":
        raise ValueError("--graph captures CUDA graphs, and these ranks run on the CPU")
    ours, absent = _made(case, chosen, options, device)
    contenders: list[Contender] = list(ours.values())
    flop = {contender.name: {p: x / ranks for p, x in case.flop().items()} for contender in contenders}
    single = alone(case, device, options.timeout) if options.one_gpu else None
    if single is not None:
        contenders.append(single)
        flop[single.name] = replace(case, seq_len=single.rows).flop()
    if options.graph is not None:
        kinds = {"skipped", *options.graph}
        for contender in [x for x in contenders if isinstance(x, Ours)]:
            if contender.name != "one GPU" and contender.name.split(" ")[1] not in kinds:
                continue
            contenders.append(Captured(contender))
            flop[contenders[-1].name] = flop[contender.name]
    connected = next((contender.mesh for (_, kind), contender in ours.items() if kind == "symmetric"), None)
    if options.awake and connected is not None:
        still = [contender for (_, kind), contender in ours.items() if kind == "skipped"]
        for contender in [*still, *([] if single is None else [single])]:
            contenders.append(Awake(contender, connected))
            flop[contenders[-1].name] = flop[contender.name]
    for backend in options.torch:
        peer = TorchContextParallel(backend, case, device)
        why = _trial(peer)
        if why:
            absent[peer.name] = why
        else:
            contenders.append(peer)
            flop[peer.name] = {p: x / ranks for p, x in case.flop().items()}
    found = Result(case, {}, {}, {}, {}, flop, absent)

    if not contenders:
        return found

    def after_round(turns: dict[str, list[Turn]]) -> None:
        if dist.get_rank() == 0:
            keep(replace(found, turns=turns))

    turns = in_turns(
        contenders, device, rounds=options.rounds, turn_ms=options.turn_ms, told=_say, after=after_round
    )
    sent, formula, memory = {}, {}, {}
    for (cut, kind), contender in ours.items():
        if kind == "skipped":
            continue
        contender.mesh.reset_traffic()
        contender.backward(contender.forward())
        records, name = contender.mesh.traffic(), contender.name
        sent[name] = {p: sum(r.sent_bytes for r in records if r.phase == p) for p in DIRECTIONS}
        formula[name] = {p: formula_bytes(p, cut, shape) for p in DIRECTIONS}
        memory[name] = memory_of(contender, cut, case, device)
        contender.mesh.check()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for captured in [x for x in contenders if isinstance(x, Captured)]:
        captured.close()
    for contender in [*ours.values(), *([] if single is None else [single])]:
        contender.mesh.close()
    return replace(found, turns=turns, sent=sent, formula=formula, memory=memory)


def _made(
    case: Case, chosen: Sequence[Cut], options: argparse.Namespace, device: torch.device
) -> tuple[dict[tuple[Cut, str], Ours], dict[str, str]]:
    """By cut and transport those that are right on a short sequence; by name why others are not timed."""
    kinds = [*([] if options.no_bare else ["skipped"]), *options.transport]
    grouped = [f"{kind}/{groups}" for kind in options.transport for groups in options.head_groups]
    exact = oracle(case, device)
    made, absent = {}, {}
    wanted = [(cut, kind) for cut in chosen for kind in (*kinds, *(grouped if cut.heads > 1 else ()))]
    for cut, kind in wanted:
        name = f"{name_of(cut)} {kind}"
        contender = None
        try:
            contender = ours_by_transport(case, cut, kind, device, options.timeout)()
            if kind != "skipped":
                check(contender.mesh, case, device, exact)
                _say(f"{name} agrees with the oracle")
            made[cut, kind] = contender
        except (ValueError, Wrong) as error:  # on all ranks alike; it costs the others nothing
            absent[name] = str(error)
            _say(f"{name} cannot be timed: {error}")
            if contender is not None:
                contender.mesh.close()
    return made, absent


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.monotonic() - BEGAN:5.1f} s  {text}", file=sys.stderr, flush=True)


def _trial(contender: Contender) -> str:
    """Why it cannot run on some rank; "" if it can."""
    why = ""
    try:
        with contender.entered():
            contender.backward(contender.forward())
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    said: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(said, why)
    return next((text for text in said if text), "")


if __name__ == "__main__":
    sys.exit(main())
