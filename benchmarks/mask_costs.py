"""What masks, softcap and dropout cost beside the causal kernel without them, in turns in one process.

    python benchmarks/mask_costs.py                  16k tokens, bfloat16; 16 heads of size 128, 32 of 64
    python benchmarks/mask_costs.py --device cpu     tries the program out with the reference kernel

Documents have random lengths of 1k tokens on average, the window is 1k keys, both causal: their times are
held against the part of the causal pairs that they leave. Before, every variant is checked on a few rows
against the reference kernel in float64.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from harness import REPORTS, Machine, Record, table, write
from meshattn_kernels import ArrayIntervals, BandIntervals, Intervals, get_kernel
from meshattn_kernels.dropout import Dropout, with_dropout
from one_rank.attention_cases import BACKWARD, FORWARD, Case
from one_rank.checks import NORM_LIMIT
from one_rank.contenders import Inputs, Ours, make_inputs
from one_rank.timing import Clock, CudaClock, HostClock, alternate

BENCHMARK, PLAIN = "mask-costs", "causal"
SOFTCAP, DROPOUT = 30.0, 0.1
CHECKED_ROWS = 300

TITLE = "Masks, softcap and dropout beside the causal kernel"
READING = """Every figure is the median over turns that all variants of a kernel take in one process; its
spread is how far the middle three fifths of the runs reach, relative to the median. *pairs* is the part of
the causal pairs of query and key that is left, and so about the least part of the causal time that is
possible. Passes work on one block and write float32 accumulators, as on a rank of a mesh."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that each variant gets")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    parser.add_argument("--out", default=str(REPORTS), help="folder of records and report")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here, so nothing can be timed; --device cpu tries the program out")
    cases = [Case(128, True, 16384, 1, 16, 16), Case(64, True, 16384, 1, 32, 32)]
    kernels = ["hopper", "triton"]
    if options.device == "cpu":
        cases, kernels = [Case(16, True, 40, 1, 4, 2)], ["reference"]
    clock: Clock = CudaClock() if options.device == "cuda" else HostClock()
    machine, records = Machine.here(commit=options.commit), []
    for case in cases:
        for kernel in kernels:
            check(kernel, case, torch.device(options.device))
            records += measure(kernel, case, clock, torch.device(options.device), options.rounds)
            path = write(BENCHMARK, [(machine, records)], render(machine, records), Path(options.out))
    print(f"written to {path}")


def documents(rows: int, device: torch.device) -> ArrayIntervals:
    """Causal inside documents of 1 to twice rows / 16 tokens."""
    draw, borders = random.Random(0), [0]
    while borders[-1] < rows:
        borders.append(min(rows, borders[-1] + draw.randint(1, rows // 8)))
    start = torch.cat([torch.full((b - a,), a, dtype=torch.int32) for a, b in pairwise(borders)])
    end = torch.arange(1, rows + 1, dtype=torch.int32)
    return ArrayIntervals(start.to(device), end.to(device), rows, rows)


def variants(kernel: str, case: Case, device: torch.device) -> Iterator[tuple[str, Any, Intervals]]:
    """Name, kernel and mask; the first is what the others are compared with."""
    rows, plain = case.rows, get_kernel(kernel)
    causal = BandIntervals(0, rows, rows, rows)
    yield PLAIN, plain, causal
    yield "documents", plain, documents(rows, device)
    yield "window", plain, BandIntervals(0, rows // 16 - 1, rows, rows)
    if kernel != "hopper":
        yield "softcap", get_kernel(kernel, SOFTCAP), causal
        yield "dropout", with_dropout(plain, Dropout(DROPOUT, seed=1)), causal


def check(kernel: str, case: Case, device: torch.device) -> None:
    """RuntimeError unless all variants are right on a few rows."""
    few = replace(case, rows=CHECKED_ROWS)
    inputs = inputs_of(few, device)
    exact = {
        name: Ours(reference, few, Inputs(*(x.double() for x in inputs)), mask).plain_results()
        for name, reference, mask in variants("reference", few, device)
    }
    for name, attention, mask in variants(kernel, few, device):
        found = Ours(attention, few, inputs, mask).plain_results()
        for what, mine, true in zip(found._fields, found, exact[name], strict=True):
            error = float((mine.double() - true).norm() / true.norm())
            if not error <= NORM_LIMIT:
                raise RuntimeError(
                    f"{case} {kernel}, {name}: {what} is wrong by {error:.1e}; it is not timed"
                )


def inputs_of(case: Case, device: torch.device) -> Inputs:
    return make_inputs(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def measure(kernel: str, case: Case, clock: Clock, device: torch.device, rounds: int) -> list[Record]:
    inputs = inputs_of(case, device)
    all_pairs = BandIntervals(0, case.rows, case.rows, case.rows).num_pairs
    runs: dict[tuple[str, str], Any] = {}
    left = {}
    for name, attention, mask in variants(kernel, case, device):
        ours = Ours(attention, case, inputs, mask)
        runs |= {(what, name): ours.passes[what] for what in (FORWARD, BACKWARD)}
        left[name] = mask.num_pairs / all_pairs
    times = alternate(clock, runs, rounds=rounds)
    records = [Record(BENCHMARK, str(case), f"{name}: part of pairs", part) for name, part in left.items()]
    for (what, name), timing in times.items():
        ratio = timing.median / times[what, PLAIN].median
        metric = f"{kernel} {what}, {name}: ms"
        records.append(Record(BENCHMARK, str(case), metric, timing.median, PLAIN, ratio, timing.spread))
        print(f"{case} {metric} {timing.median:.3f}, {ratio:.3f} of {PLAIN}", flush=True)
    return records


def render(machine: Machine, records: list[Record]) -> str:
    parts = {(r.case, r.metric.split(":")[0]): r.ours for r in records if "part of pairs" in r.metric}
    rows = []
    for record in (r for r in records if r.ratio is not None):
        what, name = record.metric.removesuffix(": ms").split(", ")
        numbers = f"{record.ours:.3f}", f"{record.ratio:.3f}", f"{parts[record.case, name]:.3f}"
        rows.append([record.case, what, name, *numbers, f"{record.spread:.1%}"])
    head = ["case", "pass", "variant", "ms", f"/ {PLAIN}", "pairs", "spread"]
    return f"# {TITLE}\n\n{machine.describe()}\n\n{READING}\n\n{table(head, rows)}\n"


if __name__ == "__main__":
    main()
