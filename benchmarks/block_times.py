"""Times of single blocks on this GPU by size, heads and mask: the table of kernel times of a topology.

    python benchmarks/block_times.py --out times.json
    python benchmarks/block_times.py --out times.json --study      # then what scaling.py needs besides

A block is what one entry of a step list computes: a chunk of queries against a chunk of keys of as many rows,
by the default kernel: alone (forward, backward) or into accumulators that hold earlier blocks (merging,
adding). Under causal striping it is the half of a square. A time is the median of runs one right behind the
other, in microseconds; of large blocks, that of one run. Blocks that the file
has already are not timed again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from harness import Machine, Timing
from meshattn.command.blocks import workspace_of
from one_rank.attention_cases import ADDING, BACKWARD, FORWARD, MERGING, Case
from one_rank.contenders import Ours, make_inputs, our_kernel
from one_rank.timing import Clock, CudaClock, Run, host_us
from scaling import METHODS, block_shapes, grid

PASSES = {"forward": FORWARD, "merging": MERGING, "backward": BACKWARD, "adding": ADDING}
ROWS = tuple(2**n for n in range(7, 19))
HEADS = (32, 16, 8, 4, 2, 1)
MOST_WORK = 2**37  # visible pairs of a block, times two: 64k rows of 32 heads under a causal mask
BURST_MS = 8.0
LONGEST_WORK, MOST_ROWS = 2**42, 2**20
"""Of the study: the passes of a block take a quarter of a minute, and as long what the host makes for it."""


def cases(head_dims: Sequence[int], groups: Sequence[int]) -> Iterator[Case]:
    """Small blocks of all kinds before large ones, so that a run that is cut short knows all kinds."""
    for rows in ROWS:
        for group in groups:
            for heads in HEADS:
                for causal in (True, False):
                    for head_dim in head_dims:
                        few = rows in (1024, 4096, 16384) and heads in (32, 8) and group == 1
                        if heads % group or not (head_dim == 128 or few):
                            continue
                        case = Case(head_dim, causal, rows, 1, heads, heads // group)
                        # A full block of shared keys takes as long as one of own.
                        if work_of(case) <= MOST_WORK and (causal or group == 1):
                            yield case


def study_cases() -> list[Case]:
    """The blocks of the scaling study, the least work first; not those of minutes."""
    shapes = {shape for case in grid() for method in METHODS for shape in block_shapes(case, method)}
    found = [Case(s.head_dim, s.causal, s.rows, 1, s.heads, s.kv_heads) for s in shapes]
    return sorted(
        (each for each in found if work_of(each) <= LONGEST_WORK and each.rows <= MOST_ROWS), key=work_of
    )


def work_of(case: Case) -> int:
    """Visible pairs of all heads, times two."""
    return case.heads * case.rows**2 * (1 if case.causal else 2)


def median_us(clock: Clock, run: Run) -> float:
    """Microseconds of a run, in the state that the device keeps under load."""
    run()
    device_ms, host_ms = clock.once(run)
    wanted = round(BURST_MS / max(device_ms, 1e-3))
    settle, repeats = min(20, max(1, wanted)), min(20, max(2 if device_ms > 20 else 4, wanted))
    lead_ms = max(0.0, 1.5 * host_ms - device_ms) * (settle + repeats)
    return 1e3 * Timing.of(clock.burst(run, settle, repeats, lead_ms)).median


def once_us(clock: Clock, runs: Mapping[str, Run]) -> dict[str, float]:
    """Microseconds of one run of each, one right behind the other, so that the host makes the tables of one
    while the device is busy with those before; again by itself where it came too late."""
    for _ in range(10):
        clock.matmul()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]
    events[0].record()
    late = []
    for name, run, before, after in zip(runs, runs.values(), events, events[1:], strict=False):
        run()
        late += [name] if before.query() else []
        after.record()
    torch.cuda.synchronize()
    spent = {name: 1e3 * a.elapsed_time(b) for name, a, b in zip(runs, events, events[1:], strict=False)}
    return spent | {name: 1e3 * clock.burst(runs[name], 0, 1, 40.0)[0] for name in late}


def measured(clock: Clock, runs: Mapping[str, Run], *, at_once: bool) -> dict[str, float | int]:
    """Microseconds by pass, and the workspace; ``at_once`` by one run each."""
    spent: dict[str, float] = {}

    def time_all() -> None:
        spent.update(
            once_us(clock, runs) if at_once else {n: median_us(clock, run) for n, run in runs.items()}
        )

    workspace = workspace_of(time_all, torch.device("cuda"))
    return {name: round(us, 2) for name, us in spent.items()} | {"workspace": workspace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--head-dims", type=int, nargs="+", help="default: 128 64")
    parser.add_argument("--groups", type=int, nargs="+", help="query heads a key/value head (default: 1 4)")
    parser.add_argument("--study", action="store_true", help="the blocks of scaling.py instead")
    parser.add_argument("--seconds", type=float, default=600, help="stop after this time, with what there is")
    args = parser.parse_args()
    head_dims, groups = args.head_dims or [128, 64], args.groups or [1, 4]
    if args.study and (args.head_dims or args.groups):
        parser.error("--study has blocks of its own: give it no --head-dims and no --groups")
    start, clock = time.monotonic(), CudaClock()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    entries: list[dict[str, object]] = known.get("block_us", [])
    host: dict[str, float] = known.get("host_us", {})
    clock.warm(1.0)
    for case in study_cases() if args.study else cases(head_dims, groups):
        sizes = {
            "head_dim": case.head_dim,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "rows": case.rows,
            "causal": case.causal,
        }
        if any(sizes.items() <= entry.items() for entry in entries):
            continue
        if time.monotonic() - start > args.seconds:
            print(f"no time left at {case}", flush=True)
            break
        run = Ours(our_kernel(args.kernel), case, make_inputs(case, torch.device("cuda"), torch.bfloat16))
        if not host:
            host = {name: round(host_us(run.passes[what]), 2) for name, what in PASSES.items()}
        runs = {name: run.passes[what] for name, what in PASSES.items()}
        entry = sizes | measured(clock, runs, at_once=work_of(case) > MOST_WORK)
        entries.append(entry)
        print(f"{time.monotonic() - start:6.1f} {entry}", flush=True)
        machine = Machine.here()
        where = {"device": machine.device, "versions": machine.versions, "date": machine.day}
        lines = ",\n".join(json.dumps(each) for each in entries)
        head = f'"kernel": "{args.kernel}", "dtype": "bf16", "where": {json.dumps(where)}'
        args.out.write_text(f'{{{head},\n"host_us": {json.dumps(host)},\n"block_us": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
