"""The emulator against reality: predicted beside measured times of the records of distributed.py.

    python benchmarks/grounding.py reports/2026-11-30-distributed-2-ranks-gpu.jsonl --topology dgx-h200 \\
        --p2p 258 70 0.12
    python benchmarks/grounding.py virtual.jsonl --topology calibrated.json

The records say what was run; the topology is a preset or was measured (`meshattn calibrate`) where they come
from. Lists are those that the library runs.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness import table
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape
from meshattn.plan.placement import Cut
from meshattn.plan.schedule import Direction
from meshattn.plan.script import pass_script
from meshattn.plan.timeline import run
from meshattn.plan.topology import Link, Topology, load_topology

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
NAME = re.compile(
    r"B(\d+)-S(\d+)-H(\d+)-H_kv(\d+)-D(\d+)-(\w+)-(causal|full)-(\w+)-P(\d+)-(?:(\d+)x)?(\d+x\d+)(?:-(.+))?"
)
EVEN = "striped"
"""Every block of other layouts would need its own cost."""


@dataclass(frozen=True)
class Measured:
    """One pass of one tile: milliseconds."""

    setting: str
    """All but the tile."""
    shape: CallShape
    cut: Cut
    transport: str
    direction: Direction
    ms: float

    @staticmethod
    def of(record: dict[str, object]) -> Measured | None:
        """None for a record of something else, or of what is not emulated."""
        found = NAME.fullmatch(str(record["case"]))
        step = re.fullmatch(r"(forward|backward) ms", str(record["metric"]))
        if not (found and step) or found[8] != EVEN or "graph" in (found[12] or ""):
            return None
        batch, seq_len, heads, kv_heads, head_dim, ranks = (int(found[n]) for n in (1, 2, 3, 4, 5, 9))
        size = ITEMSIZES[found[6]]
        exact = max(size, 4)
        rows = -(-seq_len // ranks)
        causal = found[7] == "causal"
        transport = found[12] or "p2p"
        where = str(record["case"]).replace(f"-{found[11]}", "", 1)
        return Measured(
            setting=f"{where} {step[1]}",
            shape=CallShape(batch, rows, heads, kv_heads, head_dim, head_dim, size, exact, exact, causal),
            cut=Cut(int(found[10] or 1), Tile.parse(found[11])),
            transport=transport,
            direction="forward" if step[1] == "forward" else "backward",
            ms=float(str(record["ours"])),
        )


def predict(measured: Measured, topologies: dict[str, Topology]) -> float | None:
    """Milliseconds; None for a transport that there is no topology for."""
    topology = topologies.get(measured.transport)
    if topology is None:
        return None
    script = pass_script(measured.direction, measured.shape, measured.cut, topology)
    return run(script, topology).total_us / 1e3


def compare(records: Iterable[dict[str, object]], topologies: dict[str, Topology]) -> str:
    """The table, the median error, and in how many settings the order of tiles is right."""
    rows, errors = [], []
    by_setting: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        measured = Measured.of(record)
        time = None if measured is None else predict(measured, topologies)
        if measured is None or time is None:
            continue
        error = time / measured.ms - 1
        errors.append(abs(error))
        by_setting.setdefault(measured.setting, []).append((measured.ms, time))
        rows.append(
            [measured.setting, str(measured.cut), f"{measured.ms:.3f}", f"{time:.3f}", f"{error:+.1%}"]
        )
    if not rows:
        return "no record is of a tile with a striped layout on a transport that a topology was given for"
    pairs = [
        (a, b)
        for found in by_setting.values()
        for n, a in enumerate(found)
        for b in found[:n]
        if abs(a[0] / b[0] - 1) > 0.03  # nearer ones have no order that a second run would keep
    ]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    head = ["case", "heads x a x b", "measured ms", "predicted ms", "error"]
    return (
        f"{table(head, rows)}\n\nMedian absolute error {statistics.median(errors):.1%} over {len(errors)} "
        f"passes, largest {max(errors):.1%}; {right} of {len(pairs)} pairs of tiles whose times are more "
        "than 3 % apart are in the right order."
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=Path, nargs="+", help="JSON lines of distributed.py")
    parser.add_argument("--topology", required=True, help="a preset or a file")
    parser.add_argument(
        "--p2p",
        type=float,
        nargs=3,
        metavar=("GB_PER_S", "LATENCY_US", "SM_SHARE"),
        help="NCCL's link, where the topology is that of copy engines",
    )
    args = parser.parse_args(argv)
    topology = load_topology(args.topology)
    sockets = topology
    if args.p2p:
        sockets = replace(topology, gpus_per_node=1, gpus_per_nic=1, between=Link(*args.p2p))
    free = Link(gb_per_s=1e9)
    topologies = {
        "symmetric": topology,
        "p2p": sockets,
        "auto": topology,
        "skipped": replace(topology, inside=free, between=free),
    }
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    print(compare(records, topologies))


if __name__ == "__main__":
    main()
