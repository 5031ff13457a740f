"""Whether equal inputs give equal bits: again, under load, in other processes, with fewer multiprocessors.

    python benchmarks/repeatability.py                      a minute or two on an H200

All bits of out, lse, dq, dk and dv in the accumulators (float32, before any rounding) are compared, over
poisoned memory. The control without an order of sums must differ, else the comparison would show nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import REPORTS, Machine, Record
from meshattn_kernels import ArrayIntervals, BandIntervals, Intervals
from one_rank.attention_cases import SCHEDULES, Case
from one_rank.contenders import Ours, make_inputs, our_kernel
from one_rank.kernel_report import publish

BENCHMARK = "repeatability"
HEADS = ((13, 13), (8, 2), (8, 1))
"""Query and key/value heads; with 13 the last tasks of a full mask are cut."""
BANDS = ("full", "causal")
"""Masks that hopper has other schedules for, and that any number of workers is tried with."""
MASKS = (*BANDS, "window", "documents", "zigzag")
ROWS = 4096
WORKERS = (132, 116, 66, 33)
OCCUPIED = (16, 66, 99, 132)
OCCUPIED_MS = 6.0
PROCESSES = 5
PORTABLE = ("triton", "triton-dash")


class Repeats:
    """A kernel that is run again and again over poisoned accumulators, its bits compared with the first."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self._first = [x.clone() for x in self.run()]
        if any(bool(x.isnan().any()) for x in self._first):
            raise RuntimeError(f"{ours.case}: {ours.kernel.name} left numbers that it did not write")

    def run(self) -> list[Tensor]:
        """Everything that two blocks leave, the second merged with and added to the first, and finished
        results of one block where other code of the kernel writes these."""
        ours = self._ours
        finished: Iterable[Tensor] = ()
        if ours.kernel.writes_finished:
            for x in (*ours.whole_out.values(), *ours.whole_dkv.values()):
                x.fill_(torch.nan)
            finished = ours.results()
        accumulators = [*ours.out.values(), *ours.dq.values(), *ours.dkv.values()]
        for x in accumulators:
            x.fill_(torch.nan)
        for first in (True, False):
            ours.forward(first)
            ours.backward(first)
        return [*accumulators, *finished]

    def differ(self, now: list[Tensor]) -> Tensor:
        """Whether these bits differ from the first, on the device: bool []."""
        return torch.stack(
            [(_bits(x) != _bits(first)).any() for x, first in zip(now, self._first, strict=True)]
        ).any()

    def count(self, repeats: int, around: Callable[[], object] = lambda: None) -> int:
        """How many of so many repeats differ; ``around`` is called before each."""
        found = []
        for _ in range(repeats):
            around()
            found.append(self.differ(self.run()))
        return int(torch.stack(found).sum())

    def adopt(self, ours: Ours) -> None:
        """Go on with another kernel object, which must give the bits of the first."""
        self._ours = ours

    def digest(self) -> str:
        """A hash of the bits of the first run."""
        return hashlib.sha256(b"".join(_bits(x).cpu().numpy().tobytes() for x in self._first)).hexdigest()


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    device = torch.device(options.device)
    if options.digest:
        print(json.dumps(_digests(options.head_dim, device, options.rows)))
        return
    records: list[Record] = []
    run = (Machine.here(commit=options.commit), records)
    for ask in (_again, _under_load, _with_fewer_workers, _beside_a_resident_kernel, _in_other_processes):
        for record in ask(options, device):
            wrong = "" if record.ratio == 1 else "WRONG "
            print(f"{wrong}{record.case} {record.metric}: {record.ours:.0f}", flush=True)
            records.append(record)
        path = publish(BENCHMARK, [run], Path(options.out))  # so that a run cut off leaves what it found
    print(f"written to {path}")
    if any(record.ratio == 0 for record in records):
        sys.exit("some results are not as wanted")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=[128, 64])
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    parser.add_argument("--out", default=str(REPORTS), help="folder of records and report")
    parser.add_argument("--digest", action="store_true", help="print hashes of results and end")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu tries the program out with the reference kernel",
    )
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.rows < 1:
        parser.error(f"--repeats is {options.repeats}, --rows is {options.rows}; both must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here; --device cpu tries the program out")
    return options


@dataclass(frozen=True)
class Setting:
    """A case with one of ``MASKS``; a case knows only full and causal ones."""

    case: Case
    mask: str

    def __str__(self) -> str:
        return str(self.case).replace("full", self.mask)

    def intervals(self, device: torch.device) -> Intervals | None:
        """None is the mask of the case."""
        rows = self.case.rows
        if self.mask == "window":  # an eighth of the rows, causal
            return BandIntervals(0, rows // 8, rows, rows)
        row = torch.arange(rows, dtype=torch.int32)
        if self.mask == "documents":  # random ones one behind the other, causal in each
            generator = torch.Generator().manual_seed(0)
            begins = row * (torch.rand(rows, generator=generator) < 8 / rows)
            start, end = begins.cummax(0).values.int(), row + 1
        elif self.mask == "zigzag":  # chunk 1 against chunk 2 of 4: the first half of the rows sees nothing
            start, end = torch.zeros_like(row), rows * (row >= (rows + 1) // 2)
        else:
            return None
        return ArrayIntervals(start.to(device), end.int().to(device), rows, rows)


def _settings(head_dims: Sequence[int], rows: int, masks: Sequence[str] = MASKS) -> list[Setting]:
    return [
        Setting(Case(head_dim, mask == "causal", rows, 1, heads, kv_heads), mask)
        for head_dim in head_dims
        for mask in masks
        for heads, kv_heads in HEADS
    ]


def _make(kernel: str, setting: Setting, device: torch.device, **options: object) -> Ours:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    made: Any = our_kernel(kernel)
    inputs = make_inputs(setting.case, device, dtype)
    return Ours(
        replace(made, **options) if options else made, setting.case, inputs, setting.intervals(device)
    )


def _none_differ(setting: Setting, what: str, differing: int, repeats: int) -> Record:
    return Record(
        BENCHMARK,
        str(setting),
        f"{what}: of {repeats} repeats differ",
        differing,
        "wanted 0",
        float(differing == 0),
    )


def _again(options: argparse.Namespace, device: torch.device) -> Iterable[Record]:
    """Every schedule, and the control."""
    for setting in _settings(options.head_dim, options.rows):
        if device.type == "cpu":
            kernels: Sequence[str] = ("reference",)
        else:
            cyclic = {"full": ["shift"], "causal": ["symmetric_shift"]}.get(setting.mask, [])
            kernels = ("hopper", *(f"hopper@{name}" for name in (*SCHEDULES, *cyclic)), *PORTABLE)
        for kernel in kernels:
            try:
                repeats = Repeats(_make(kernel, setting, device))
            except ValueError as refusal:
                print(f"{setting} {kernel}: refused, {refusal}")
                continue
            yield _none_differ(setting, kernel, repeats.count(options.repeats), options.repeats)
        if device.type == "cuda":
            differing = Repeats(_make("hopper-unordered", setting, device)).count(options.repeats)
            yield Record(
                BENCHMARK,
                str(setting),
                f"hopper-unordered: of {options.repeats} repeats differ",
                differing,
                "wanted more than 0",
                float(differing > 0),
            )


def _under_load(options: argparse.Namespace, device: torch.device) -> Iterable[Record]:
    """Products of small and large matrices on another stream."""
    if device.type == "cpu":
        return
    stream = torch.cuda.Stream()
    small, large = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for n in (1024, 4096))

    def load() -> None:
        with torch.cuda.stream(stream):
            for x in (small, large, small):
                torch.mm(x, x)

    for setting in _settings(options.head_dim, options.rows):
        for kernel in ("hopper", *PORTABLE):
            repeats = Repeats(_make(kernel, setting, device))
            differing = repeats.count(options.repeats, load)
            torch.cuda.synchronize()
            yield _none_differ(setting, f"{kernel} beside a loaded stream", differing, options.repeats)


def _with_fewer_workers(options: argparse.Namespace, device: torch.device) -> Iterable[Record]:
    if device.type == "cpu":
        return
    for setting in _settings(options.head_dim, options.rows, BANDS):
        for kernel in ("hopper", "triton-dash"):
            repeats = Repeats(_make(kernel, setting, device))
            for workers in WORKERS:
                repeats.adopt(_make(kernel, setting, device, workers=workers))
                each = -(-options.repeats // len(WORKERS))
                yield _none_differ(setting, f"{kernel}, workers={workers}", repeats.count(each), each)


def _beside_a_resident_kernel(options: argparse.Namespace, device: torch.device) -> Iterable[Record]:
    """Multiprocessors held by another kernel: with workers for the others ours runs meanwhile, with all
    workers it must wait."""
    if device.type == "cpu":
        return
    from one_rank.occupy import occupy

    total = torch.cuda.get_device_properties(device).multi_processor_count
    stream = torch.cuda.Stream()
    for setting in _settings(options.head_dim, options.rows, BANDS):
        repeats = Repeats(_make("hopper", setting, device))
        for held in (n for n in OCCUPIED if n <= total):
            workers = total - held or None
            repeats.adopt(_make("hopper", setting, device, workers=workers))
            repeats.run()
            differing = meanwhile = 0
            for _ in range(_quarter(options.repeats)):
                torch.cuda.synchronize()
                free = occupy(held, OCCUPIED_MS, stream)
                now = repeats.run()
                done = torch.cuda.current_stream().record_event()
                done.synchronize()
                meanwhile += not free.query()
                differing += int(repeats.differ(now))
            count = _quarter(options.repeats)
            what = f"hopper, {held} multiprocessors held, workers={workers}, {meanwhile} done meanwhile"
            yield _none_differ(setting, what, differing, count)


def _quarter(repeats: int) -> int:
    return -(-repeats // 4)


def _in_other_processes(options: argparse.Namespace, device: torch.device) -> Iterable[Record]:
    """Hashes of the same results in processes that start from nothing, all at the same time."""
    command = [sys.executable, __file__, "--digest", "--device", options.device, "--rows", str(options.rows)]
    command += ["--head-dim", *map(str, options.head_dim)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES if device.type == "cuda" else 2)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a process that makes hashes has failed; its message is above")
    answers = [json.loads(output.splitlines()[-1]) for output in outputs]
    for name in answers[0]:
        kernel, case = name.split(" ")
        distinct = len({answer[name] for answer in answers})
        yield Record(
            BENCHMARK,
            case,
            f"{kernel}: distinct results of {len(answers)} processes",
            distinct,
            "wanted 1",
            float(distinct == 1),
        )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _digests(head_dims: Sequence[int], device: torch.device, rows: int) -> dict[str, str]:
    kernels = ("hopper", *PORTABLE) if device.type == "cuda" else ("reference",)
    return {
        f"{kernel} {setting}": Repeats(_make(kernel, setting, device)).digest()
        for kernel in kernels
        for setting in _settings(head_dims, rows)
    }


if __name__ == "__main__":
    main()
