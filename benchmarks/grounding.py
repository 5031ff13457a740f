"""The emulator against reality: predicted beside measured times of the records of distributed.py.

    python benchmarks/grounding.py --set 2-gpus.jsonl dgx-h200 --p2p 258 70 0.12 --set virtual.jsonl mine.json

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

from harness import REPORTS, Machine, Record, table, write
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.schedule import Direction
from meshattn.plan.timeline import run
from meshattn.plan.topology import Link, Topology, load_topology, presets

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
NAME = re.compile(
    r"B(\d+)-S(\d+)-H(\d+)-H_kv(\d+)-D(\d+)-(\w+)-(causal|full)-(\w+)-P(\d+)-(?:(\d+)x)?(\d+x\d+)(?:-(.+))?"
)
EVEN = "striped"
"""Every block of other layouts would need its own cost."""
APART = 0.03
"""Times nearer than this have no order that a second run would keep."""
INTRO = """\
Measured times are those of `distributed.py`, the slowest rank's median; predicted ones come from the
step lists that were run, the links of the topology named and its kernel times. NCCL's link inside a node
is what was measured for one exchange (258 GB/s, 70 us, 16 of 132 multiprocessors). Topologies of virtual
nodes were measured by `meshattn calibrate` on as many ranks at the same rate; their files lie beside this
report. Skipped is a tile without its transfers. What is left: at 4k tokens a rank on two GPUs most passes
are as long as their host work, which the model knows by one number alone."""


COMMANDS = """\
## Commands

    P="python benchmarks/virtual_cluster.py --ranks 16 --rate 100 --"    # 4 and 8: --rate 200, longer --rows
    $P -m meshattn calibrate --out 16.json --transport p2p --kernel triton --head-dim 64 --heads 16 \\
        --rows 512 1k --messages 64k 4M
    $P benchmarks/distributed.py --seq-len 8192 --heads 16 --head-dim 64 --dtype bfloat16 --no-bare \\
        --kernel triton
    P="python benchmarks/virtual_cluster.py --ranks 16 --rate 1 --device cpu --"
    $P -m meshattn calibrate --out mine.json --head-dim 64 --heads 4 --rows 32 64 128
    $P benchmarks/distributed.py --seq-len 1024 --heads 4 --head-dim 64 --kernel reference --no-bare
    python benchmarks/grounding.py --p2p 258 70 0.12 --set ...-2-ranks-gpu.jsonl dgx-h200 \\
        --set ...-16-ranks-gpu-virtual.jsonl 16.json --set ...-16-ranks-virtual.jsonl mine.json"""


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
        step = re.fullmatch(r"(forward|backward) (ms|s)", str(record["metric"]))
        if not (found and step) or found[8] != EVEN or "graph" in (found[12] or ""):
            return None
        batch, seq_len, heads, kv_heads, head_dim, ranks = (int(found[n]) for n in (1, 2, 3, 4, 5, 9))
        size = ITEMSIZES[found[6]]
        exact = max(size, 4)
        rows = -(-seq_len // ranks)
        causal = found[7] == "causal"
        transport = found[12] or "p2p"
        cut = f"{found[10]}x{found[11]}" if found[10] else found[11]
        where = str(record["case"]).replace(f"-{cut}", "", 1)
        return Measured(
            setting=f"{where} {step[1]}",
            shape=CallShape(batch, rows, heads, kv_heads, head_dim, head_dim, size, exact, exact, causal),
            cut=Cut(int(found[10] or 1), Tile.parse(found[11])),
            transport=transport,
            direction="forward" if step[1] == "forward" else "backward",
            ms=float(str(record["ours"])) * (1 if step[2] == "ms" else 1e3),
        )


def predict(measured: Measured, topologies: dict[str, Topology]) -> float | None:
    """Milliseconds; None for a transport that there is no topology for."""
    topology = topologies.get(measured.transport)
    if topology is None:
        return None
    script = pass_script(measured.direction, measured.shape, measured.cut, topology)
    return run(script, topology).total_us / 1e3


@dataclass(frozen=True)
class Comparison:
    """Records of one place beside what the emulator says."""

    rows: tuple[tuple[Measured, float], ...]

    @staticmethod
    def of(records: Iterable[dict[str, object]], topologies: dict[str, Topology]) -> Comparison:
        found = [measured for record in records if (measured := Measured.of(record))]
        times = [(measured, predict(measured, topologies)) for measured in found]
        return Comparison(tuple((measured, time) for measured, time in times if time is not None))

    @property
    def errors(self) -> list[float]:
        return [time / measured.ms - 1 for measured, time in self.rows]

    @property
    def order(self) -> tuple[int, int]:
        """Pairs of tiles in the right order, and all whose times are more than ``APART`` apart."""
        pairs = [
            (a, b, x, y)
            for n, (a, x) in enumerate(self.rows)
            for b, y in self.rows[:n]
            if a.setting == b.setting and abs(a.ms / b.ms - 1) > APART
        ]
        return sum((a.ms < b.ms) == (x < y) for a, b, x, y in pairs), len(pairs)

    def text(self) -> str:
        """The table, the median error, and how often the order of tiles is right."""
        if not self.rows:
            return "no record is of a tile with a striped layout on a transport that a topology is given for"
        head = ["case", "heads x a x b", "measured ms", "predicted ms", "error"]
        lines = [
            [m.setting, str(m.cut), f"{m.ms:.3f}", f"{time:.3f}", f"{time / m.ms - 1:+.1%}"]
            for m, time in self.rows
        ]
        sizes = [abs(error) for error in self.errors]
        right, pairs = self.order
        text = (
            f"{table(head, lines)}\n\nMedian absolute error {statistics.median(sizes):.1%} over {len(sizes)} "
            f"passes, largest {max(sizes):.1%}"
        )
        if pairs:
            text += (
                f"; {right} of {pairs} pairs of tiles whose times are more than {APART:.0%} apart are in the "
                "right order"
            )
        return text + "."

    def records(self) -> list[Record]:
        return [
            Record("grounding", f"{m.setting} {m.cut}", "predicted ms", time, "measured", time / m.ms)
            for m, time in self.rows
        ]


def topologies_of(topology: Topology, p2p: Link | None) -> dict[str, Topology]:
    """By transport: ``p2p`` is NCCL's link where the topology is that of copy engines."""
    sockets = topology
    if p2p:
        sockets = replace(topology, gpus_per_node=1, gpus_per_nic=1, between=p2p)
    free = Link(gb_per_s=1e9)
    return {
        "symmetric": topology,
        "p2p": sockets,
        "auto": topology,
        "skipped": replace(topology, inside=free, between=free),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--set",
        nargs=2,
        action="append",
        required=True,
        metavar=("RECORDS", "TOPOLOGY"),
        help="JSON lines of distributed.py, and a preset or a file; any number of times",
    )
    parser.add_argument(
        "--p2p",
        type=float,
        nargs=3,
        metavar=("GB_PER_S", "LATENCY_US", "SM_SHARE"),
        help="NCCL's link, where the topology is a preset, which is that of copy engines",
    )
    parser.add_argument("--report", action="store_true", help="write a dated report, too")
    args = parser.parse_args(argv)
    parts, found = [], []
    for source, name in args.set:
        topology = load_topology(name)
        lines = [json.loads(line) for line in Path(source).read_text().splitlines()]
        nccl = Link(*args.p2p) if args.p2p and name in presets() else None
        comparison = Comparison.of(lines, topologies_of(topology, nccl))
        where = (
            f"{lines[0]['device']}; {lines[0]['versions']}; commit {lines[0]['commit']}; {lines[0]['date']}"
        )
        inside, between = topology.inside, topology.between
        links = (
            f"{topology.gpus_per_node} ranks a node; inside {inside.gb_per_s:.4g} GB/s and "
            f"{inside.latency_us:.0f} us"
        )
        if between is not None:
            links += f", between {between.gb_per_s:.4g} GB/s and {between.latency_us:.0f} us"
        parts.append(f"## {where}\n\nTopology {topology.name}: {links}.\n\n{comparison.text()}")
        found += comparison.records()
    text = "\n\n".join(["# The emulator against what was measured", INTRO, *parts, COMMANDS]) + "\n"
    print(text)
    if args.report:
        print(f"written to {write('grounding', [(Machine.here(), found)], text, REPORTS)}")


if __name__ == "__main__":
    main()
