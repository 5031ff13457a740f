"""All that two, four or eight GPUs of one host should show, in one command of at most eight minutes.

    python benchmarks/many_gpus.py --ranks 8

Kernels compiled ahead, self-test, tables, a million tokens, training, slowed links, links and kernels for
predictions: each in processes of its own with a limit of its own, so that one that fails or hangs costs
nothing but its figures. Time that a step leaves goes to the next. The report is written behind every one of
them, and says how they ended, or that they did not run. With fewer GPUs than ranks the ranks share them,
without any they run on the CPU (see virtual_cluster.py), and the sizes are small: that tries the script, and
its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from across_ranks.many_findings import comparisons, marks, predictions, training
from across_ranks.many_steps import HERE, SOCKETS, TOPOLOGY, Scale, Step, scale_of, steps
from grounding import Comparison
from harness import REPORTS, Machine, Record, table, write
from virtual.undertaker import undertaker
from virtual_cluster import find_gpus, interrupt

EIGHT_MINUTES = 480.0
STOPPED, LATE, NO_TIME, NOT_YET = 130, 124, 125, 126
"""Codes of steps that did not come to an end by themselves."""
ENDED = {
    0: "good",
    STOPPED: "stopped with the whole",
    LATE: "past its limit",
    NO_TIME: "did not run: no time was left",
    NOT_YET: "did not run",
}
_SPARE = 15.0  # seconds of the whole for the last words and the report
_SPEECH = 6.0  # of its limit, for ranks that share a machine to say where they were
_LINES, _AT_END = 60, 20  # the last ones that a step says, in the report, and of one that ended well


def command(step: Step, ranks: int, scale: Scale) -> list[str]:
    """How a step is started: by itself, one rank a GPU of one host, as nodes, or as ranks that share a
    machine."""
    if step.alone:
        return [sys.executable, *step.program]
    if scale.real and step.rate is None:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *start, *step.program]
    network = ["--no-network"] if step.rate is None else ["--rate", f"{step.rate:g}"]
    limit = ["--timeout", f"{max(step.limit - _SPEECH, step.limit / 2):g}"]
    cluster = [str(HERE / "virtual_cluster.py"), "--ranks", str(ranks), "--device", scale.device]
    return [sys.executable, *cluster, *network, *limit, "--", *step.program]


@dataclass(frozen=True)
class Outcome:
    """How a step ended; ``compiled`` counts the kernels that were not in Triton's cache, ``told`` the bytes
    that it had said when it was ended, None where it came to an end by itself."""

    step: Step
    code: int = NOT_YET
    seconds: float = 0.0
    compiled: int = 0
    told: int | None = None

    @property
    def ended(self) -> str:
        return ENDED.get(self.code, f"failed with code {self.code}")


def run(step: Step, ranks: int, scale: Scale, out: Path) -> Outcome:
    """Run a step to its end or its limit, and end all that it has started; what it says goes to a file of its
    folder."""
    log = _log(out, step)
    log.parent.mkdir(parents=True, exist_ok=True)
    began, known, told = time.monotonic(), _cached_kernels(), None
    with log.open("w") as file, undertaker(Path(tempfile.mkdtemp())) as mark:
        process = subprocess.Popen(
            command(step, ranks, scale),
            env={"OMP_NUM_THREADS": "1", **os.environ, **mark},  # as torchrun has it, which says so at length
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(step.limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            code = STOPPED if isinstance(end, KeyboardInterrupt) else LATE
            told = log.stat().st_size  # what follows tells where torchrun was
        finally:
            _end(process)
    return Outcome(step, code, time.monotonic() - began, _cached_kernels() - known, told)


def forget(out: Path, step: Step) -> None:
    """What an earlier run wrote for a step, which is not to be taken for what this one does."""
    files = [path for end in ("txt", "jsonl", "md") for path in (out / step.name).glob(f"*.{end}")]
    files += [out / name for name in (TOPOLOGY, SOCKETS) if str(out / name) in step.program]
    for path in files:
        path.unlink(missing_ok=True)


def _log(out: Path, step: Step) -> Path:
    return out / step.name / "output.txt"


def _cached_kernels() -> int:
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.glob("*")) if folder.is_dir() else 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it end its ranks, and make sure of it."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def limits(steps: Sequence[Step], seconds: float) -> list[Step]:
    """The steps with limits that fit into so many seconds together: all shorter by the same part, or as they
    are."""
    part = min(1.0, seconds / sum(step.limit for step in steps))
    return [replace(step, limit=part * step.limit) for step in steps]


def report(
    outcomes: Sequence[Outcome],
    ranks: int,
    scale: Scale,
    out: Path,
    *,
    commit: str | None = None,
    predict: bool = False,
) -> Path:
    """How every step ended and what it said; the figures lie in the folders of the steps."""
    machine = Machine.here(commit=commit)
    rows = [
        [x.step.name, x.ended, f"{x.seconds:.0f}", f"{x.step.limit:.0f}", f"{x.compiled}"] for x in outcomes
    ]
    records: list[Record] = []
    found: dict[str, Comparison] = {}

    def predicted() -> str:
        if predict:
            found.update(comparisons(out, scale))
        return predictions(found, out)

    ran = {x.step.name for x in outcomes if x.code not in (NOT_YET, NO_TIME)}
    told = _or_why(predicted)  # first: the next needs what it finds
    sections = {
        "To be shown": _or_why(lambda: marks(out, scale, found, ran)),
        "Training": _or_why(lambda: training(out, records)),
        "Predicted and measured": told,
    }
    on = "GPUs" if scale.device == "cuda" else "the CPU"
    where = (
        f"{ranks} GPUs" if scale.real else f"{ranks} ranks that share {on}: a trial, its times mean nothing"
    )
    head = ["step", "ended", "seconds", "limit", "kernels compiled"]
    parts = [f"# {where}", machine.describe(), table(head, rows)]
    parts += [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    for outcome in outcomes:
        name = outcome.step.name
        records.append(Record("many-gpus", name, "code", outcome.code))
        if outcome.code in (NOT_YET, NO_TIME):
            continue
        records.append(Record("many-gpus", name, "seconds", outcome.seconds))
        records.append(Record("many-gpus", name, "kernels compiled", outcome.compiled))
        said = _or_why(lambda outcome=outcome: _said(outcome, out))
        parts.append(f"## {name}\n\n`{' '.join(outcome.step.program[1:])}`\n\n{said}")
    return write(f"many-gpus-{ranks}{scale.name}", [(machine, records)], "\n\n".join([*parts, ""]), out)


def _said(outcome: Outcome, out: Path) -> str:
    """The report of a step, as far as it has come, without its title; the last that it said where it has none
    or did not end well."""
    parts = []
    for path in sorted((out / outcome.step.name).glob("*.md")):
        _, _, body = path.read_text().partition("\n")
        parts.append(re.sub("^#", "##", body.strip(), flags=re.MULTILINE))
    if outcome.code or not parts:
        said = _log(out, outcome.step).read_bytes()[: outcome.told]
        lines = said.decode(errors="replace").strip().splitlines()
        parts.append("\n".join(lines[-(_LINES if outcome.code else _AT_END) :]))
    return "\n\n".join(parts)


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
    parser.add_argument("--only", nargs="+", metavar="STEP", help="names of steps")
    parser.add_argument("--seconds", type=float, default=EIGHT_MINUTES, help="for all of it (default 480)")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    parser.add_argument("--out", type=Path, default=REPORTS / "many-gpus", help="folder of the reports")
    options = parser.parse_args(arguments)
    gpus = len(find_gpus())
    ranks, scale = options.ranks or gpus, scale_of(options.ranks or gpus, gpus)
    if ranks < 2 or ranks % 2:
        parser.error(f"{ranks} ranks, but its cuts need an even number: try --ranks 4")
    if not options.seconds > _SPARE:
        parser.error(f"--seconds is {options.seconds:g}; it must be more than {_SPARE:g}")
    names = [step.name for step in steps(ranks, scale, options.out)]
    unknown = set(options.only or ()) - set(names)
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: steps are {' '.join(names)}")
    end = time.monotonic() + options.seconds - _SPARE
    chosen = steps(ranks, scale, options.out, options.only or (), options.commit)
    outcomes = {step.name: Outcome(step) for step in limits(chosen, options.seconds - _SPARE)}
    for step in chosen:
        forget(options.out, step)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        for name, waiting in list(outcomes.items()):
            later = sum(x.step.limit for x in outcomes.values() if x.code == NOT_YET) - waiting.step.limit
            left = end - time.monotonic()
            # What those before have left of their limits goes to the next.
            step = replace(waiting.step, limit=max(left - later, min(left, waiting.step.limit)))
            if left > 0:
                outcomes[name] = Outcome(step, STOPPED)  # if it is stopped outside of its wait
                outcomes[name] = run(step, ranks, scale, options.out)
            else:
                outcomes[name] = replace(waiting, code=NO_TIME)
            print(f"{name}: {outcomes[name].ended}, {outcomes[name].seconds:.0f} s", flush=True)
            if outcomes[name].code == STOPPED:
                break
            report(list(outcomes.values()), ranks, scale, options.out, commit=options.commit)
    finally:
        path = report(list(outcomes.values()), ranks, scale, options.out, commit=options.commit, predict=True)
        print(f"written to {path}")
    return int(any(outcome.code for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
