"""All that two, four or eight GPUs of one host should show, in one command of at most eight minutes.

    python benchmarks/many_gpus.py --ranks 8

Self-test, links and kernels, tables, slowed links, a million tokens, training: each in processes of its own
with a limit of its own, so that one that fails or hangs costs nothing but its figures, and all together with
one of eight minutes. The report is written behind every one of them. With fewer GPUs than ranks the ranks
share them, without any they run on the CPU (see virtual_cluster.py), and the sizes are small: that tries the
script, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from across_ranks.many_steps import HERE, SOCKETS, TOPOLOGY, Scale, Step, scale_of, steps
from grounding import Comparison, topologies_of
from harness import REPORTS, Machine, Record, table, write
from meshattn.plan.topology import Topology, load_topology
from virtual.undertaker import undertaker
from virtual_cluster import find_gpus, interrupt

EIGHT_MINUTES = 480.0
_SPARE = 15.0  # seconds beyond its limit for a program that keeps it itself, and says more
_LINES = 60  # the last ones that a step says, in the report


def command(step: Step, ranks: int, scale: Scale) -> list[str]:
    """How a step is started: one rank a GPU of one host, or as nodes, or as ranks that share a machine."""
    if scale.real and step.rate is None:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *start, *step.program]
    network = ["--no-network"] if step.rate is None else ["--rate", f"{step.rate:g}"]
    limit = ["--timeout", f"{step.limit:g}"]
    cluster = [str(HERE / "virtual_cluster.py"), "--ranks", str(ranks), "--device", scale.device]
    return [sys.executable, *cluster, *network, *limit, "--", *step.program]


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    step: Step
    code: int  # 0 if all is well, 124 past its limit, 125 if no time was left for it
    seconds: float
    said: str


def run(step: Step, ranks: int, scale: Scale, out: Path, mark: Mapping[str, str]) -> Outcome:
    """Run a step to its end or its limit, with ``mark`` in its environment; what it says goes to a file of
    its folder, too."""
    folder = out / step.name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "output.txt"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            command(step, ranks, scale),
            env={**os.environ, **mark},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit + _SPARE)
        except BaseException as stopped:
            _end(process)
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            code = 124
    return Outcome(step, code, time.monotonic() - began, log.read_text(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it end its ranks, and make sure of it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def training(out: Path, records: list[Record]) -> str:
    """Tokens a second of both runs, and how far their losses are apart; its figures become records."""
    runs = {}
    for kind in ("mesh", "ring"):
        log = out / f"train-{kind}" / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        runs[kind] = [json.loads(line) for line in lines]
    said = []
    for kind, run in runs.items():
        if len(run) > 1:
            pace = statistics.median(one["tokens"] / one["seconds"] for one in run[1:])
            records.append(Record("many-gpus", f"train-{kind}", "tokens/s", pace))
            said.append(f"{kind}: {pace:,.0f} tokens/s, loss {run[0]['loss']:.4f} to {run[-1]['loss']:.4f}")
    apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(*runs.values(), strict=False)]
    if apart:
        records.append(Record("many-gpus", "train", "largest loss difference", max(apart), "ring"))
        said.append(f"The losses of their {len(apart)} first steps differ by {max(apart):.1e} at most.")
    return "\n".join(said)


def predictions(out: Path, rate: float) -> str:
    """What the emulator says of the tables, on the topologies that were measured beside them."""
    if not (out / TOPOLOGY).exists():
        return ""
    here = load_topology(out / TOPOLOGY)
    nccl = load_topology(out / SOCKETS) if (out / SOCKETS).exists() else here
    link = nccl.inside if nccl.between is None else nccl.between
    by_step = {
        "tables": topologies_of(here, link),
        "slow-links": topologies_of(here, replace(link, gb_per_s=rate / 1e3)),
        "million": topologies_of(here, link),
    }
    parts = [_compared(out / name, topologies) for name, topologies in by_step.items()]
    return "\n\n".join(part for part in parts if part)


def _compared(folder: Path, topologies: dict[str, Topology]) -> str:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    found = Comparison.of(map(json.loads, lines), topologies)
    return f"### {folder.name}\n\n{found.text()}" if found.rows else ""


def report(
    outcomes: Sequence[Outcome], ranks: int, scale: Scale, out: Path, *, predict: bool = False
) -> Path:
    """How every step ended and what it said; the figures lie in the folders of the steps."""
    machine = Machine.here()
    rows = [
        [x.step.name, "good" if x.code == 0 else f"code {x.code}", f"{x.seconds:.0f}", f"{x.step.limit:.0f}"]
        for x in outcomes
    ]
    records: list[Record] = []
    trained = _or_why(lambda: training(out, records))
    on = "GPUs" if scale.device == "cuda" else "the CPU"
    where = (
        f"{ranks} GPUs" if scale.real else f"{ranks} ranks that share {on}: a trial, its times mean nothing"
    )
    parts = [f"# {where}", machine.describe(), table(["step", "ended", "seconds", "limit"], rows)]
    parts += [f"## Training\n\n{trained}"] if trained else []
    predicted = _or_why(lambda: predictions(out, scale.rate)) if predict else ""
    parts += [f"## Predicted and measured\n\n{predicted}"] if predicted else []
    for outcome in outcomes:
        records.append(Record("many-gpus", outcome.step.name, "seconds", outcome.seconds))
        records.append(Record("many-gpus", outcome.step.name, "code", outcome.code))
        tail = "\n".join(outcome.said.strip().splitlines()[-_LINES:])
        parts.append(f"## {outcome.step.name}\n\n`{' '.join(outcome.step.program[1:])}`\n\n{tail}")
    return write(f"many-gpus-{ranks}{scale.name}", [(machine, records)], "\n\n".join([*parts, ""]), out)


def _or_why(make: Callable[[], str]) -> str:
    """What it makes, or why it cannot: a part that is cut short must not cost the report."""
    try:
        return make()
    except Exception as error:
        return f"cannot be told: {type(error).__name__}: {error}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="default: one a GPU")
    parser.add_argument("--only", nargs="+", help="names of steps")
    parser.add_argument("--out", type=Path, default=REPORTS / "many-gpus", help="folder of the reports")
    options = parser.parse_args(arguments)
    gpus = len(find_gpus())
    ranks, scale = options.ranks or gpus, scale_of(options.ranks or gpus, gpus)
    if ranks < 2 or ranks % 2:
        parser.error(f"{ranks} ranks, but its cuts need an even number: try --ranks 4")
    every = steps(ranks, scale, options.out)
    unknown = set(options.only or ()) - {step.name for step in every}
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: steps are {' '.join(step.name for step in every)}")
    signal.signal(signal.SIGTERM, interrupt)
    outcomes: list[Outcome] = []
    try:
        end = time.monotonic() + EIGHT_MINUTES
        with undertaker(Path(tempfile.mkdtemp())) as mark:
            for step in every:
                if options.only is not None and step.name not in options.only:
                    continue
                left = end - _SPARE - time.monotonic()
                if left > 0:
                    limited = replace(step, limit=min(step.limit, left))
                    outcomes.append(run(limited, ranks, scale, options.out, mark))
                else:
                    outcomes.append(Outcome(step, 125, 0.0, "no time was left"))
                print(f"{step.name}: code {outcomes[-1].code}, {outcomes[-1].seconds:.0f} s", flush=True)
                report(outcomes, ranks, scale, options.out)
    finally:
        print(f"written to {report(outcomes, ranks, scale, options.out, predict=True)}")
    return int(not outcomes or any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
