"""From records to the report: what was wanted beside what was measured, then every table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from harness import Machine, Record, Run, report_path, table, write
from one_rank.attention_cases import ADDING, BACKWARD, FORWARD, MERGING, PASSES, Case
from one_rank.kernel_picture import draw
from one_rank.wanted import Requirement, requirements

RATE = " TF/s"
HOST = " host us"
MATMUL = "matmul: product"


METHOD = """\
TF/s count 4 B H S_q S_k D operations forward, 2.5 times as many backward, half of them under a causal mask;
under a window or documents (packed, long) those of the pairs that are seen.
Each figure is the median over turns that all kernels of a row take in one process; a turn is timed once its
kernel has run for some 20 ms behind 40 ms of matrix products, so that the clock has settled to what the GPU's
power limit leaves and no kernel gains or loses by the one before it. In brackets is how far the middle three
fifths of the runs reach, relative to the median. A ratio is the mean over rounds of the ratio of two turns of
a round, and behind +- stands its standard error. A *total* is all that a user of one GPU pays: out, or delta
and dq, dk, dv, in the type of the inputs; other passes use float32 accumulators. Every kernel was
checked against float64 at the very shape that is timed."""


class Book:
    """The records of all runs, to look figures up in."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.records = [(number, record) for number, (_, records) in enumerate(runs) for record in records]
        self._spreads = {
            (number, record.case, record.metric.removesuffix(RATE)): record.spread
            for number, record in self.records
            if record.metric.endswith(RATE)
        }

    def ratios(self, requirement: Requirement) -> Iterator[tuple[Record, float]]:
        """The records that answer, with the spread of the peer."""
        for number, record in self.records:
            case = Case.parse(record.case)
            peer, _, elsewhere = (record.peer or "").partition(" at ")
            if (
                case is not None
                and record.metric == requirement.ours + RATE
                and peer == requirement.peer
                and requirement.counts(case)
            ):
                yield record, self._spreads.get((number, elsewhere or record.case, peer)) or 0.0

    def rates(self, what: str) -> dict[tuple[int, str], dict[str, Record]]:
        """Records of a pass beside the matrix product: by run and case, then by kernel."""
        found: dict[tuple[int, str], dict[str, Record]] = {}
        for number, record in self.records:
            kernel, _, rest = record.metric.partition(": ")
            if rest == what + RATE and record.peer == MATMUL:
                found.setdefault((number, record.case), {})[kernel] = record
        return found

    def matmuls(self) -> dict[tuple[int, str], float]:
        """TF/s of the matrix product that took turns with the figures of a run and case."""
        return {
            (number, record.case): record.ours
            for number, record in self.records
            if record.metric == MATMUL + RATE
        }


def publish(name: str, runs: Sequence[Run], folder: Path, notes: Sequence[str] = ()) -> Path:
    """Write records, picture and report of these runs, with ``notes`` as its first paragraphs; returns the
    path of the report."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = report_path(name, runs, folder).with_suffix(".png")
    drawn = draw(_rates_by_case(Book(runs)), picture)
    return write(name, runs, render(runs, picture.name if drawn else None, notes), folder)


def load(path: Path) -> Run:
    """The machine and the records of a JSON lines file."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines:
        raise ValueError(f"{path} holds no record")
    first = lines[0]
    machine = Machine(first["device"], first["versions"], first["commit"], first["date"])
    names = [field.name for field in fields(Record)]
    return machine, [Record(**{name: line.get(name) for name in names}) for line in lines]


def render(runs: Sequence[Run], picture: str | None = None, notes: Sequence[str] = ()) -> str:
    """The Markdown report; ``picture`` is the name of a file beside it."""
    book = Book(runs)
    parts = [
        "# Attention kernels",
        *dict.fromkeys(machine.describe() for machine, _ in runs),
        METHOD,
        *notes,
        *_section("What was wanted", _wanted(book)),
        *([f"![TF/s by length]({picture})"] if picture else []),
    ]
    for what in PASSES:
        parts += _section(f"TF/s: {what}", _rates(book, what))
    parts += _section("Ratios", "\n\n".join(_ratios(book)))
    parts += _section("Host time of a call, microseconds", _host(book))
    parts += _section("Repeatability", _repeatability(book))
    parts += _section("compute-sanitizer", _sanitizer(book))
    parts += _section("Checks", _checks(book))
    return "\n\n".join(parts) + "\n"


def _rates_by_case(book: Book) -> dict[str, dict[Case, dict[str, float]]]:
    """Of causal and full cases, which the picture is of."""
    found: dict[str, dict[Case, dict[str, float]]] = {}
    for what in PASSES:
        for (_, name), row in book.rates(what).items():
            case = Case.parse(name)
            if case is not None and not case.window and not case.documents:
                rates = {kernel: record.ours for kernel, record in row.items()}
                found.setdefault(what, {}).setdefault(case, {}).update(rates)
    return found


def _section(title: str, body: str) -> list[str]:
    return [f"## {title}", body] if body else []


def _wanted(book: Book) -> str:
    rows = []
    for requirement in requirements():
        found = list(book.ratios(requirement))
        if not found:
            continue
        least = min(record.ratio or 0.0 for record, _ in found)
        cells = [
            f"{_short(record.case)} {_ratio(record)} ({record.spread or 0:.1%}, {spread:.1%})"
            for record, spread in found
        ]
        rows.append(
            [
                requirement.measure,
                f"{requirement.wanted:.2f}",
                "; ".join(cells),
                "yes" if least >= requirement.wanted else f"no ({least:.3f})",
            ]
        )
    rows += [row for row in (_wanted_of_host(book), *_wanted_of_bits(book)) if row]
    if not rows:
        return ""
    note = "In brackets the spread of ours and of the peer. A row counts as met if each of its cases is."
    return table(["measure", "wanted at least", "measured", "met"], rows) + f"\n\n{note}"


def _wanted_of_host(book: Book) -> list[str]:
    calls = (f"hopper: {FORWARD}", f"hopper: {MERGING}", f"hopper: {BACKWARD}", f"hopper: {ADDING}")
    found = [record.ours for _, record in book.records if record.metric in [call + HOST for call in calls]]
    if not found:
        return []
    return [
        "host time of a call, us",
        "at most 40",
        f"{min(found):.0f} to {max(found):.0f}",
        "yes" if max(found) <= 40 else "no",
    ]


def _wanted_of_bits(book: Book) -> Iterator[list[str]]:
    for peer, measure in (
        ("wanted 0", "repeats that differ"),
        ("wanted 1", "distinct results of fresh processes"),
        ("wanted more than 0", "repeats of the unordered control that differ"),
        ("wanted clean", "compute-sanitizer: kernels without errors, 1 each"),
    ):
        found = [record for _, record in book.records if record.peer == peer]
        if found:
            numbers = sorted({int(record.ours) for record in found})
            yield [
                measure,
                peer.removeprefix("wanted "),
                f"{numbers[0]} to {numbers[-1]} in {len(found)} settings",
                "yes" if all(record.ratio == 1 for record in found) else "no",
            ]


def _short(case: str) -> str:
    """Mask and length."""
    return " ".join(case.split("-")[1:3])


def _ratio(record: Record) -> str:
    return f"{record.ratio:.3f}" + ("" if record.error is None else f" +- {record.error:.3f}")


def _rates(book: Book, what: str) -> str:
    found = book.rates(what)
    kernels = list(dict.fromkeys(kernel for row in found.values() for kernel in row))
    if not kernels:
        return ""
    rows, matmuls = [], book.matmuls()
    for key, row in sorted(found.items(), key=lambda item: (_order(item[0][1]), item[0][0])):
        first = next(iter(row.values()))
        rows.append(
            [
                key[1],
                *(
                    f"{row[kernel].ours:.0f} ({row[kernel].spread or 0:.0%})" if kernel in row else ""
                    for kernel in kernels
                ),
                f"{matmuls.get(key, 0.0):.0f}",
                f"{first.ratio or 0:.0%}",
            ]
        )
    return table(["case", *kernels, "matmul 8192", f"{kernels[0]} / matmul"], rows)


def _order(case: str) -> tuple[str, str, int, str]:
    head_dim, mask, rows = case.split("-")[:3]
    return head_dim, mask, int(rows.removeprefix("S").split("x")[0]), case


def _ratios(book: Book) -> list[str]:
    """A table for each figure that is compared: cases by peers."""
    found: dict[str, dict[tuple[int, str], dict[str, str]]] = {}
    for number, record in book.records:
        if record.metric.endswith(RATE) and record.peer not in (None, MATMUL) and record.ratio:
            peer = record.peer.partition(" at ")[0] if record.peer else ""
            row = found.setdefault(record.metric.removesuffix(RATE), {}).setdefault((number, record.case), {})
            row[peer + (", unshared heads" if " at " in (record.peer or "") else "")] = _ratio(record)
    tables = []
    for figure, rows in found.items():
        peers = list(dict.fromkeys(peer for row in rows.values() for peer in row))
        body = [
            [case, *(row.get(peer, "") for peer in peers)]
            for (_, case), row in sorted(rows.items(), key=lambda item: (_order(item[0][1]), item[0][0]))
        ]
        tables.append(f"### {figure}, relative to\n\n" + table(["case", *peers], body))
    return tables


def _host(book: Book) -> str:
    rows = [
        [record.case, record.metric.removesuffix(HOST), f"{record.ours:.1f}"]
        for _, record in book.records
        if record.metric.endswith(HOST)
    ]
    graphs = [
        [record.case, record.metric, "yes" if record.ours else "NO"]
        for _, record in book.records
        if "graph" in record.metric
    ]
    return table(["case", "call", "median"], [*rows, *graphs]) if rows else ""


def _repeatability(book: Book) -> str:
    """What was found in all cases together."""
    found: dict[tuple[str, str], list[int]] = {}
    for _, record in book.records:
        if record.benchmark == "repeatability":
            found.setdefault((record.metric, record.peer or ""), []).append(int(record.ours))
    rows = [
        [metric, wanted, f"{min(numbers)} to {max(numbers)}", str(len(numbers))]
        for (metric, wanted), numbers in found.items()
    ]
    return table(["measure", "", "found", "cases"], rows) if rows else ""


def _sanitizer(book: Book) -> str:
    rows = [
        [record.case, *record.metric.split(": ", 1)]
        for _, record in book.records
        if record.benchmark == "sanitizer"
    ]
    return table(["tool", "kernel", "verdict"], rows) if rows else ""


def _checks(book: Book) -> str:
    worst: dict[str, tuple[float, str]] = {}
    absent: dict[str, list[str]] = {}
    for _, record in book.records:
        kernel, _, rest = record.metric.partition(": ")
        if rest == "error":
            worst[kernel] = max(worst.get(kernel, (0.0, "")), (record.ours, record.case))
        elif rest.startswith("absent"):
            absent.setdefault(f"{kernel}, {rest}", []).append(record.case)
    if not worst and not absent:
        return ""
    rows = [
        [kernel, f"{error:.2f}", case, "right" if error <= 1 else "WRONG, not timed"]
        for kernel, (error, case) in worst.items()
    ]
    text = "Greatest error against float64 over all cases, in parts of what is allowed (1 % of the norm of a "
    text += "tensor, 3 % of its greatest number):\n\n" + table(["kernel", "error", "at", ""], rows)
    if absent:
        text += "\n\n" + "\n".join(f"- {what}: {len(cases)} case(s)" for what, cases in absent.items())
    return text
