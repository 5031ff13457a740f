"""Our attention kernels and their peers: same inputs, one process, in turns, in the power-limited steady
state.

    python benchmarks/kernels.py --suite quick              ours and FlashAttention-4 at 16k and 4k
    python benchmarks/kernels.py --suite required           what wanted.py asks for, and no more
    python benchmarks/kernels.py --suite all                everything, minutes
    python benchmarks/kernels.py --join a.jsonl b.jsonl     one report of several runs

Suites: quick; required; peers (all kernels); portable (those for any GPU); lengths (1k to 32k); schedules
(each backward schedule); groups (GQA and MQA against MHA); blocks (blocks of a mesh step, merging and
adding); documents (packed documents and a window); launch (host time of a call, CUDA graphs).

Every kernel is first checked against float64 at the shape that is timed; one that fails is reported and not
timed, and the code is 1. Records are written after each comparison, so that a run that is cut off leaves what
it has measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from harness import REPORTS, Machine, Record, Run, Timing, write
from one_rank.attention_cases import (
    ADDING,
    BACKWARD,
    BACKWARD_TOTAL,
    FORWARD,
    FORWARD_TOTAL,
    MERGING,
    PASSES,
    SUITES,
    Case,
    Comparison,
    Figure,
)
from one_rank.checks import Oracle
from one_rank.contenders import Contender, Inputs, Ours, Results, make_inputs, our_kernel
from one_rank.kernel_report import load, publish, render
from one_rank.launch_cost import launch_records
from one_rank.peers import PEERS, make_peer, versions
from one_rank.timing import Clock, CudaClock, HostClock, alternate

BENCHMARK = "kernels"
MATMUL = "matmul"
LAUNCH = "launch"


@dataclass
class Session:
    """Where results of one run go."""

    name: str
    folder: Path
    machine: Machine
    records: list[Record] = field(default_factory=list)

    def add(self, case: object, metric: str, value: float, **more: float | str | None) -> None:
        self.records.append(Record(BENCHMARK, str(case), metric, value, **more))  # type: ignore[arg-type]

    @property
    def run(self) -> Run:
        return self.machine, self.records

    def save(self) -> None:
        """What there is so far, without the picture."""
        write(self.name, [self.run], render([self.run]), self.folder)


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    folder = Path(options.out)
    if options.join:
        runs = [load(Path(name)) for name in options.join]
        print(f"written to {publish('kernels', runs, folder, options.note)}")
        return
    device = torch.device(options.device)
    clock: Clock = CudaClock() if device.type == "cuda" else HostClock()
    names = [*SUITES, LAUNCH] if "all" in options.suite else options.suite
    wrong = 0
    for name in names:
        label = "kernels-" + "-".join(
            [name, *(f"D{d}" for d in options.head_dim if len(options.head_dim) == 1)]
        )
        session = Session(label, folder, Machine.here(versions(), options.commit))
        clock.warm(2.0)
        if name == LAUNCH:
            for record in launch_records(BENCHMARK, options.head_dim):
                session.records.append(record)
                session.save()
        else:
            comparisons = _trial() if device.type == "cpu" else SUITES[name](options.head_dim)
            for comparison in comparisons:
                _measure(comparison, session, clock, device, options.rounds)
                session.save()
        print(f"written to {publish(label, [session.run], folder)}", flush=True)
        wrong += sum(not r.ours <= 1 for r in session.records if r.metric.endswith(": error"))
    if wrong:
        sys.exit(f"{wrong} kernels were wrong and not timed")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", nargs="+", choices=(*SUITES, LAUNCH, "all"), default=["quick"])
    parser.add_argument("--head-dim", type=int, nargs="+", choices=(64, 128), default=[128, 64])
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="turns that each kernel gets; twice as many beside FlashAttention-4 in the suite required",
    )
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    parser.add_argument("--out", default=str(REPORTS), help="folder of records, picture and report")
    parser.add_argument(
        "--join", nargs="+", metavar="JSONL", help="render one report of these runs, time nothing"
    )
    parser.add_argument("--note", action="append", default=[], help="a paragraph of the joined report")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu tries the program out with the reference kernel on a tiny case",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; it must be at least 1")
    missing = [name for name in options.join or [] if not Path(name).is_file()]
    if missing:
        parser.error(f"--join: no such file: {', '.join(missing)}")
    if not options.join and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is here, so nothing can be timed; --device cpu tries the program out")
    if options.device == "cpu" and LAUNCH in options.suite:
        parser.error("launches are those of a GPU; choose another suite for --device cpu")
    return options


def _trial() -> list[Comparison]:
    case = Case(16, True, 40, 1, 4, 2)
    figures = {what: Figure("reference", case, what) for what in PASSES}
    return [Comparison(tuple(figures.values()), ((figures[MERGING], figures[FORWARD]),))]


def _measure(
    comparison: Comparison, session: Session, clock: Clock, device: torch.device, rounds: int
) -> None:
    """Make, check, time, record."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs: dict[Case, Inputs] = {}
    oracles: dict[Case, Oracle] = {}
    ready: dict[tuple[str, Case], Contender] = {}
    for kernel, case in comparison.kernels:
        if case not in inputs:
            inputs[case] = make_inputs(case, device, dtype)
            oracles[case] = Oracle(case, inputs[case])
        contender = _checked(comparison, kernel, case, inputs[case], oracles[case], session)
        if contender is not None:
            ready[kernel, case] = contender
    timed = [figure for figure in comparison.figures if (figure.kernel, figure.case) in ready]
    runs = {figure: ready[figure.kernel, figure.case].passes[figure.what] for figure in timed}
    matmul = Figure(MATMUL, comparison.figures[0].case, "product")
    times = alternate(clock, {**runs, matmul: clock.matmul}, rounds=rounds * comparison.turns)
    _record(comparison, times, matmul, clock.matmul_flop, session)


def _checked(
    comparison: Comparison, kernel: str, case: Case, inputs: Inputs, oracle: Oracle, session: Session
) -> Contender | None:
    """The kernel with its tensors, if it takes the case and is right."""
    try:
        if kernel in PEERS:
            contender: Contender = make_peer(kernel, case, inputs)
            kinds = [contender.results]
        else:
            contender = ours = Ours(our_kernel(kernel), case, inputs)
            kinds = _results(ours, {figure.what for figure in comparison.figures if figure.kernel == kernel})
        errors = [oracle.errors(results()) for results in kinds]
        _settle(inputs)
    except Exception as reason:  # peers refuse by exceptions of many kinds
        _settle(inputs)  # raises again if the device is lost
        text = " ".join(f"{type(reason).__name__}: {reason}".split())[:300]
        print(f"{case} {kernel}: absent, {text}", flush=True)
        session.add(case, f"{kernel}: absent ({text})", 0.0)
        return None
    worst = max(max(each.values()) for each in errors)
    session.add(case, f"{kernel}: error", worst, peer="allowed error", ratio=worst)
    if worst <= 1:
        return contender
    print(f"{case} {kernel}: WRONG, not timed: errors in parts of what is allowed {errors}", flush=True)
    return None


def _results(ours: Ours, timed: set[str]) -> list[Callable[[], Results]]:
    """What must be right for these passes to be timed."""
    kinds: list[Callable[[], Results]] = []
    if timed & {FORWARD_TOTAL, BACKWARD_TOTAL}:
        kinds.append(ours.results)
    if timed & {FORWARD, BACKWARD}:
        kinds.append(ours.plain_results)
    if timed & {MERGING, ADDING}:
        kinds.append(ours.doubled_results)
    return kinds


def _settle(inputs: Inputs) -> None:
    if inputs.q.is_cuda:
        torch.cuda.synchronize()


def _record(
    comparison: Comparison, times: dict[Figure, Timing], matmul: Figure, matmul_flop: float, session: Session
) -> None:
    """A record for each figure beside the matrix product, and one for each ratio."""
    rates = {
        figure: (matmul_flop if figure == matmul else figure.case.flop(figure.what)) / timing.median * 1e-9
        for figure, timing in times.items()
    }
    for case in dict.fromkeys(case for _, case in comparison.kernels):
        session.add(case, f"{matmul} TF/s", rates[matmul], spread=times[matmul].spread)
    for figure, rate in rates.items():
        if figure == matmul:
            continue
        session.add(
            figure.case,
            f"{figure} TF/s",
            rate,
            peer=str(matmul),
            ratio=rate / rates[matmul],
            spread=times[figure].spread,
        )
    for ours, peer in comparison.ratios:
        if ours in rates and peer in rates:
            where = "" if peer.case == ours.case else f" at {peer.case}"
            faster, error = times[ours].times_faster(times[peer])
            work = ours.case.flop(ours.what) / peer.case.flop(peer.what)
            session.add(
                ours.case,
                f"{ours} TF/s",
                rates[ours],
                peer=f"{peer}{where}",
                ratio=faster * work,
                spread=times[ours].spread,
                error=None if error is None else error * work,
            )
    shown = " | ".join(f"{figure} {rate:.0f} ({times[figure].spread:.0%})" for figure, rate in rates.items())
    print(f"{comparison.figures[0].case} TF/s: {shown}", flush=True)


if __name__ == "__main__":
    main()
