"""What all benchmarks share: the machine they ran on, statistics of repeats, records, and the report."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

REPORTS = Path(__file__).parent / "reports"


@dataclass(frozen=True)
class Machine:
    """Where and with what a benchmark ran."""

    device: str
    versions: str
    commit: str
    day: str

    @staticmethod
    def here(packages: Mapping[str, str] | None = None, commit: str | None = None) -> Machine:
        """This machine, with the versions of more packages; ``commit`` names the code where it is no git
        checkout."""
        if torch.cuda.is_available():
            device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        else:
            device = f"CPU, {torch.get_num_threads()} thread(s) a rank, {platform.machine()}"
        if cluster := os.environ.get("VIRTUAL_CLUSTER"):  # set by virtual_cluster.py
            device = f"{device}; {cluster}"
        versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": _triton()}
        versions.update(packages or {})
        return Machine(
            device=device,
            versions=", ".join(f"{name} {version}" for name, version in versions.items() if version),
            commit=commit or _commit(),
            day=date.today().isoformat(),
        )

    def describe(self) -> str:
        return f"{self.device}; {self.versions}; commit {self.commit}; {self.day}"


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repeated runs: the median, how far the middle three fifths reach, and where runs took
    turns with others the median of each turn."""

    median: float
    low: float
    high: float
    turns: tuple[float, ...] = ()

    @staticmethod
    def of(milliseconds: Sequence[float]) -> Timing:
        ordered = sorted(milliseconds)
        last = len(ordered) - 1
        return Timing(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)])

    @property
    def spread(self) -> float:
        """Width of the middle three fifths, relative to the median."""
        return (self.high - self.low) / self.median

    def times_faster(self, peer: Timing) -> tuple[float, float | None]:
        """Mean over rounds of the peer's time / ours in turns side by side, and its standard error: both see
        the same clock and heat, so this is far better known than the ratio of the medians is."""
        ratios = [other / mine for mine, other in zip(self.turns, peer.turns, strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None
        return statistics.mean(ratios), error

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


@dataclass(frozen=True)
class Record:
    """One figure; `ratio` compares `ours` with `peer`, the same figure of the named other, and `error` is the
    standard error of the ratio where it is a mean."""

    benchmark: str
    case: str
    metric: str
    ours: float
    peer: str | None = None
    ratio: float | None = None
    spread: float | None = None
    error: float | None = None


Run = tuple[Machine, Sequence[Record]]


def write(name: str, runs: Sequence[Run], report: str, folder: Path) -> Path:
    """Write the records of one or more runs as JSON lines beside the Markdown report; returns the path of the
    report."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for machine, records in runs:
        where = {
            "device": machine.device,
            "versions": machine.versions,
            "commit": machine.commit,
            "date": machine.day,
        }
        lines += [json.dumps({**asdict(record), **where}) for record in records]
    path = report_path(name, runs, folder)
    path.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    path.write_text(report)
    return path


def report_path(name: str, runs: Sequence[Run], folder: Path) -> Path:
    """Where the report of these runs goes: under the day of the last."""
    return folder / f"{max(machine.day for machine, _ in runs)}-{name}.md"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well in a terminal."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
