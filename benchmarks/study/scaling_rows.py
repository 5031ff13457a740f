"""The figures of the scaling study, by case and method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness import Record
from scaling import Figures

MILLION = 2**20
NAMES = {"usp": "USP", "ulysses": "Ulysses", "mesh": "mesh, tile alone", "mesh+heads": "mesh with head axis"}
"""Of methods, for people."""


class Study:
    """All figures, by case and method."""

    def __init__(self, rows: Sequence[Figures]) -> None:
        self.cases: dict[str, dict[str, Figures]] = {}
        for row in rows:
            self.cases.setdefault(str(row.case), {})[row.method] = row

    def select(self, **wanted: object) -> list[Mapping[str, Figures]]:
        """Those whose case has these fields."""
        return [
            found
            for found in self.cases.values()
            if all(getattr(found["ring"].case, name) == value for name, value in wanted.items())
        ]


def speed_up(found: Mapping[str, Figures], method: str) -> float:
    return found["ring"].total_us / found[method].total_us


def less_sent(found: Mapping[str, Figures], method: str) -> float:
    """Part of the ring's bytes that a rank does not send."""
    return 1 - found[method].rank / found["ring"].rank


def records(study: Study) -> list[Record]:
    """Times and bytes of all, the rest of 256 GPUs and a million tokens."""
    found = []
    for case, methods in study.cases.items():
        ring = methods["ring"]
        for method, row in methods.items():
            figures = {
                "step ms": (row.total_us / 1e3, ring.total_us / 1e3),
                "sent bytes": (row.rank, ring.rank),
            }
            if (row.case.ranks, row.case.seq_len) == (256, MILLION):
                figures["exposed ms"] = row.exposed_us / 1e3, ring.exposed_us / 1e3
                figures["busiest card bytes"] = row.card, ring.card
                figures["leaving bytes"] = row.leaving, ring.leaving
                figures["buffer bytes"] = row.memory, ring.memory
            for metric, (ours, rings) in figures.items():
                ratio = float(f"{ours / rings:.5g}") if rings else None
                value = float(f"{ours:.6g}")
                found.append(Record("scaling", case, f"{method}: {metric}", value, "ring", ratio))
    return found
