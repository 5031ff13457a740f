"""The figures of the scaling study, by case and method."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import Record

MILLION = 2**20
NAMES = {"usp": "USP", "ulysses": "Ulysses", "mesh": "mesh, tile alone", "mesh+heads": "mesh with head axis"}
"""Of methods, for people."""


@dataclass(frozen=True)
class Row:
    """One method in one case."""

    name: str
    cluster: str
    ranks: int
    seq_len: int
    heads: str
    causal: bool
    sm_share: float
    method: str
    cut: str
    where: str
    total_us: float
    kernels_us: float
    exposed_us: float
    rank: int
    card: int
    leaving: int
    memory: int

    @staticmethod
    def read(line: str) -> Row:
        data: dict[str, Any] = json.loads(line)
        case = data.pop("case")
        del data["reduce_itemsize"]
        return Row(**case, **data)


class Study:
    """All rows, by case and method."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.cases: dict[str, dict[str, Row]] = {}
        for row in rows:
            self.cases.setdefault(row.name, {})[row.method] = row

    def select(self, **wanted: object) -> list[Mapping[str, Row]]:
        """Cases whose ring has these fields."""
        return [
            found
            for found in self.cases.values()
            if all(getattr(found["ring"], name) == value for name, value in wanted.items())
        ]


def speed_up(found: Mapping[str, Row], method: str) -> float:
    return found["ring"].total_us / found[method].total_us


def less_sent(found: Mapping[str, Row], method: str) -> float:
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
            if (row.ranks, row.seq_len) == (256, MILLION):
                figures["exposed ms"] = row.exposed_us / 1e3, ring.exposed_us / 1e3
                figures["busiest card bytes"] = row.card, ring.card
                figures["leaving bytes"] = row.leaving, ring.leaving
                figures["buffer bytes"] = row.memory, ring.memory
            for metric, (ours, rings) in figures.items():
                ratio = float(f"{ours / rings:.5g}") if rings else None
                value = float(f"{ours:.6g}")
                found.append(Record("scaling", case, f"{method}: {metric}", value, "ring", ratio))
    return found
