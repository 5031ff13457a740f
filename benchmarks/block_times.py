"""Times of single blocks on this GPU by size, heads and mask: the table of kernel times of a topology.

    python benchmarks/block_times.py --out times.json

A block is what one entry of a step list computes: a chunk of queries against a chunk of keys of as many rows,
by the default kernel: alone (forward, backward) or into accumulators that hold earlier blocks (merging,
adding). Under causal striping it is the half of a square. A time is the median of runs one right behind the
other, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from harness import Machine, Timing
from one_rank.attention_cases import ADDING, BACKWARD, FORWARD, MERGING, Case
from one_rank.contenders import Ours, make_inputs, our_kernel
from one_rank.timing import Clock, CudaClock, Run, host_us

PASSES = {"forward": FORWARD, "merging": MERGING, "backward": BACKWARD, "adding": ADDING}
ROWS = tuple(2**n for n in range(7, 19))
HEADS = (32, 16, 8, 4, 2, 1)
MOST_WORK = 2**37  # visible pairs of a block, times two: 64k rows of 32 heads under a causal mask
BURST_MS = 8.0


def cases(head_dims: Sequence[int], groups: Sequence[int]) -> Iterator[Case]:
    """Small blocks of all kinds before large ones, so that a run that is cut short knows all kinds."""
    for rows in ROWS:
        for group in groups:
            for heads in HEADS:
                for causal in (True, False):
                    for head_dim in head_dims:
                        few = rows in (1024, 4096, 16384) and heads in (32, 8) and group == 1
                        work = heads * rows**2 * (1 if causal else 2)
                        if heads % group or work > MOST_WORK or not (head_dim == 128 or few):
                            continue
                        if causal or group == 1:  # a full block of shared keys takes as long as one of own
                            yield Case(head_dim, causal, rows, 1, heads, heads // group)


def median_us(clock: Clock, run: Run) -> float:
    """Microseconds of a run, in the state that the device keeps under load."""
    run()
    device_ms, host_ms = clock.once(run)
    wanted = round(BURST_MS / max(device_ms, 1e-3))
    settle, repeats = min(20, max(1, wanted)), min(20, max(2 if device_ms > 20 else 4, wanted))
    lead_ms = max(0.0, 1.5 * host_ms - device_ms) * (settle + repeats)
    return 1e3 * Timing.of(clock.burst(run, settle, repeats, lead_ms)).median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", default="hopper")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 4], help="query heads a key/value head")
    parser.add_argument("--seconds", type=float, default=600, help="stop after this time, with what there is")
    args = parser.parse_args()
    start, clock, entries = time.monotonic(), CudaClock(), []
    clock.warm(1.0)
    host: dict[str, float] = {}
    for case in cases(args.head_dims, args.groups):
        if time.monotonic() - start > args.seconds:
            print(f"no time left at {case}", flush=True)
            break
        run = Ours(our_kernel(args.kernel), case, make_inputs(case, torch.device("cuda"), torch.bfloat16))
        if not host:
            host = {name: round(host_us(run.passes[what]), 2) for name, what in PASSES.items()}
        entry = {
            "head_dim": case.head_dim,
            "heads": case.heads,
            "kv_heads": case.kv_heads,
            "rows": case.rows,
            "causal": case.causal,
        }
        entry |= {name: round(median_us(clock, run.passes[what]), 2) for name, what in PASSES.items()}
        entries.append(entry)
        print(f"{time.monotonic() - start:6.1f} {entry}", flush=True)
        machine = Machine.here()
        where = {"device": machine.device, "versions": machine.versions, "date": machine.day}
        lines = ",\n".join(json.dumps(each) for each in entries)
        args.out.write_text(
            f'{{"kernel": "{args.kernel}", "where": {json.dumps(where)},\n"host_us": {json.dumps(host)},\n'
            f'"block_us": [\n{lines}\n]}}\n'
        )


if __name__ == "__main__":
    main()
