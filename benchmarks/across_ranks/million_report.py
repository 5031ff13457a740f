"""The tables and the records of one layer at a million tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from across_ranks.rank_contenders import Case
from across_ranks.sampled_oracle import Samples
from harness import Machine, Record, table, write
from meshattn.plan.schedule import Direction

INTRO = (
    "Every cut ran once, behind a pass through a window of the same length and matrix products. "
    "Times are those of the slowest rank. The kernel alone is what it takes for a rank's own block, scaled "
    "by the visible pairs; WxAxB is a head axis of W ranks around the tile AxB."
)
ERRORS = (
    "Against float64 at {rows} rows (spread over the sequence, and all of the last ones) and {keys} keys: "
    "the largest of a row and head, relative to the length of the exact one. dv over all keys is do over all "
    "queries, and k * dk over all keys is q * dq over all rows: how far they are apart, relative. "
    "Results whose bits are equal on all ranks have the same digest."
)
MEMORY = (
    "Sent as the transports count it, which equals the formula. The peak is that of both passes beyond q, k, "
    "v and do. The formula is the planner's for buffers, out with its lse and delta, and the gradients or "
    "what the kernel keeps for itself while it runs (measured alone), whichever is more: not both are there "
    "at a time."
)


@dataclass(frozen=True)
class Alone:
    """What the kernel takes for the work of a rank if it does nothing else."""

    forward: float  # seconds
    backward: float
    own: int  # bytes that it keeps for itself while it runs

    def __str__(self) -> str:
        return f"the kernel alone: {self.forward:.3f} s forward, {self.backward:.3f} s backward"

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Outcome:
    """Of a cut on a transport, on the rank for which it came out worst."""

    name: str
    forward: float  # seconds
    backward: float
    host: float
    errors: dict[str, float]
    sent: Mapping[Direction, int]
    formula: Mapping[Direction, int]
    peak: int  # bytes beyond the arguments, what transports receive in included
    kept: int  # out, lse, delta
    gradients: int
    buffers: int  # by the formula
    own: int  # what the kernel keeps for itself for a block
    bits: int  # equal for equal bits of all results on all ranks

    def __str__(self) -> str:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        sent = "as" if self.sent == self.formula else "NOT as"
        return (
            f"{self.name}: {self.forward:.3f} s forward, {self.backward:.3f} s backward, bytes {sent} by the "
            f"formula; errors: {errors}"
        )

    @property
    def both(self) -> float:
        return self.forward + self.backward

    @property
    def expected_peak(self) -> int:
        """While the kernel works, or when the gradients are written."""
        return self.kept + self.buffers + max(self.own, self.gradients)


def report(
    case: Case,
    outcomes: Sequence[Outcome],
    alone: Alone,
    samples: Samples,
    folder: Path,
    commit: str | None,
) -> str:
    """Write the report and its records; returns it."""
    ranks, machine = dist.get_world_size(), Machine.here(commit=commit)
    flop = {step: x / ranks for step, x in case.flop().items()}

    def rate(step: str, seconds: float) -> str:
        return f"{flop[step] / seconds / 1e12:.0f}"

    head = ["cut", "forward s", "backward s", "TFLOP/s fwd", "bwd", "both", "of the kernel alone", "host s"]
    rows = [
        [
            x.name,
            f"{x.forward:.3f}",
            f"{x.backward:.3f}",
            *(rate(step, s) for step, s in zip(flop, (x.forward, x.backward, x.both), strict=True)),
            f"{alone.both / x.both:.3f}",
            f"{x.host:.1f}",
        ]
        for x in outcomes
    ]
    limit = alone.forward, alone.backward
    rates = [rate(step, s) for step, s in zip(flop, (*limit, alone.both), strict=True)]
    rows.append(["kernel alone", *(f"{x:.3f}" for x in limit), *rates, "", ""])
    errors = table(
        ["cut", *outcomes[0].errors, "digest of the bits"],
        [[x.name, *(f"{error:.1e}" for error in x.errors.values()), f"{x.bits:016x}"] for x in outcomes],
    )
    counted = any(x.peak for x in outcomes)  # nobody counts what CPU ranks take
    names = ["cut", "GiB sent fwd", "bwd", "peak GiB", "by formula", "measured / formula"]
    names += ["out, lse, delta", "gradients", "buffers", "kernel's own"]
    sizes = []
    for x in outcomes:
        expected = x.expected_peak
        parts = (x.kept, x.gradients, x.buffers, x.own)
        peak = (
            (_gib(x.peak), _gib(expected), f"{x.peak / expected:.3f}")
            if counted
            else ("", _gib(expected), "")
        )
        sizes.append([x.name, *map(_gib, x.sent.values()), *peak])
        sizes[-1] += map(_gib, parts)
    memory = table(names, sizes)
    text = "\n\n".join(
        [
            f"# One layer at {case.seq_len:,} tokens on {ranks} ranks",
            machine.describe(),
            str(case),
            INTRO,
            table(head, rows),
            f"## Errors\n\n{ERRORS.format(rows=len(samples.rows), keys=len(samples.keys))}\n\n{errors}",
            f"## Bytes and memory of a rank\n\n{MEMORY}\n\n{memory}",
            "",
        ]
    )
    path = write("million-tokens", [(machine, _records(case, outcomes, alone, ranks))], text, folder)
    return f"{text}written to {path}"


def _records(case: Case, outcomes: Sequence[Outcome], alone: Alone, ranks: int) -> list[Record]:
    label = f"{case}-P{ranks}"
    names, limit = ("forward s", "backward s"), (alone.forward, alone.backward)
    records = [Record("million", f"{label}-kernel", name, x) for name, x in zip(names, limit, strict=True)]
    for x in outcomes:
        mine = f"{label}-{x.name.replace(' ', '-')}"
        for name, spent, least in zip(names, (x.forward, x.backward), limit, strict=True):
            records.append(Record("million", mine, name, spent, "kernel alone", least / spent))
        records += [Record("million", mine, f"error {name}", error) for name, error in x.errors.items()]
        records.append(Record("million", mine, f"digest {x.bits:016x}", x.bits))
        for step, num_bytes in x.sent.items():
            ratio = num_bytes / x.formula[step] if x.formula[step] else None
            records.append(Record("million", mine, f"{step} bytes", num_bytes, "formula", ratio))
        if x.peak:
            ratio = x.peak / x.expected_peak
            records.append(Record("million", mine, "peak bytes", x.peak, "formula", ratio))
    return records


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
