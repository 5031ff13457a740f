"""The report of the scaling study, from the figures that scaling.py has written.

python benchmarks/scaling_report.py scaling.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import REPORTS, Machine, Record, report_path, table, write
from meshattn.plan.assignment import Tile
from scaling import METHODS, NCCL_SHARE, TOKENS, Case, forwards, one_tile
from study.scaling_pictures import draw_bytes, draw_strong, draw_two, draw_weak

NAMES = {"usp": "USP", "ulysses": "Ulysses", "mesh": "mesh, tile alone", "mesh+heads": "mesh with head axis"}
CLUSTERS = {"dgx-h200": "50 GB/s a GPU", "a3-high": "25 GB/s for two GPUs"}
MILLION = 2**20


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


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def case_table(found: Mapping[str, Row]) -> str:
    """All methods of one case."""
    head = [
        "method",
        "cut",
        "placement",
        "step ms",
        "times ring",
        "kernels alone",
        "exposed",
        "sent a rank GiB",
    ]
    head += ["less than ring", "busiest card GiB", "leaving all nodes GiB", "peak GiB"]
    lines = []
    for method in METHODS:
        if method in found:
            row = found[method]
            lines.append(
                [
                    NAMES.get(method, method),
                    row.cut,
                    row.where,
                    f"{row.total_us / 1e3:.1f}",
                    f"{speed_up(found, method):.2f}",
                    f"{row.kernels_us / row.total_us:.1%}",
                    f"{row.exposed_us / row.total_us:.1%}",
                    _gib(row.rank),
                    f"{less_sent(found, method):.1%}",
                    _gib(row.card),
                    _gib(row.leaving),
                    _gib(row.memory),
                ]
            )
    return table(head, lines)


def strong_table(study: Study, cluster: str, heads: str, causal: bool) -> str:
    """A million tokens on more and more GPUs."""
    found = study.select(cluster=cluster, heads=heads, causal=causal, seq_len=MILLION, sm_share=0.0)
    found = sorted(found, key=lambda case: case["ring"].ranks)
    head = [
        "GPUs",
        "ring ms",
        *(f"{NAMES.get(m, m)}" for m in METHODS[1:]),
        "ring exposed",
        "best mesh exposed",
    ]
    lines = []
    for case in found:
        best = min((case[m] for m in ("mesh", "mesh+heads") if m in case), key=lambda row: row.total_us)
        lines.append(
            [
                str(case["ring"].ranks),
                f"{case['ring'].total_us / 1e3:.1f}",
                *(f"{speed_up(case, m):.2f}x" if m in case else "-" for m in METHODS[1:]),
                f"{case['ring'].exposed_us / case['ring'].total_us:.0%}",
                f"{best.exposed_us / best.total_us:.0%}",
            ]
        )
    return table(head, lines)


def lengths_table(study: Study) -> str:
    """Speed-up and savings of a tile alone at 256 GPUs, over lengths."""
    head = ["cluster", "heads", "tokens", "tile", "times ring", "less sent", "with head axis", "times ring"]
    lines = []
    for cluster in CLUSTERS:
        for heads in ("MHA", "GQA"):
            cases = study.select(cluster=cluster, heads=heads, causal=True, ranks=256, sm_share=0.0)
            for case in sorted(cases, key=lambda case: case["ring"].seq_len):
                tile, both = case["mesh"], case["mesh+heads"]
                lines.append(
                    [
                        cluster,
                        heads,
                        f"{tile.seq_len // 1024}k",
                        tile.cut.removeprefix("1x"),
                        f"{speed_up(case, 'mesh'):.2f}",
                        f"{less_sent(case, 'mesh'):.1%}",
                        both.cut,
                        f"{speed_up(case, 'mesh+heads'):.2f}",
                    ]
                )
    return table(head, lines)


def paper_table(study: Study) -> str:
    """Beside the figures of arXiv 2512.20968."""

    def cases(heads: str) -> list[Mapping[str, Row]]:
        found = study.select(cluster="dgx-h200", heads=heads, causal=True, ranks=256, sm_share=0.0)
        return sorted(found, key=lambda case: case["ring"].seq_len)

    mha, gqa = cases("MHA"), cases("GQA")
    million = next(case for case in mha if case["ring"].seq_len == MILLION)
    (taken,) = (
        case
        for case in study.select(cluster="dgx-h200", heads="MHA", seq_len=MILLION, ranks=256)
        if case["ring"].sm_share
    )

    def both(value: Any) -> str:
        return f"MHA {value(mha)}, GQA {value(gqa)}"

    def best_speed(found: Sequence[Mapping[str, Row]]) -> str:
        return f"{max(speed_up(case, 'mesh') for case in found):.2f}"

    def mean_speed(found: Sequence[Mapping[str, Row]]) -> str:
        return f"{statistics.mean(speed_up(case, 'mesh') for case in found):.2f}"

    def best_saved(found: Sequence[Mapping[str, Row]]) -> str:
        return f"{max(less_sent(case, 'mesh') for case in found):.1%}"

    def mean_saved(found: Sequence[Mapping[str, Row]]) -> str:
        return f"{statistics.mean(less_sent(case, 'mesh') for case in found):.1%}"

    case = Case("dgx-h200", 256, MILLION, "MHA", True)
    named = [one_tile(replace(case, sm_share=share), Tile(8, 32)) for share in (0.0, NCCL_SHARE)]
    rings = million["ring"], taken["ring"]
    times = [ring.total_us / each.total_us for ring, each in zip(rings, named, strict=True)]
    layers = 32
    ring, tile = million["ring"].total_us, million["mesh"].total_us
    lines = [
        ["times ring at 256 GPUs, best", "3.4", both(best_speed)],
        ["times ring at 256 GPUs, mean", "2.9", both(mean_speed) + " (over 128k to 4M tokens)"],
        ["less traffic at 256 GPUs, best", "85.4 %", both(best_saved) + " (bytes that a rank sends)"],
        ["less traffic at 256 GPUs, mean", "79.0 %", both(mean_saved)],
        [
            "the tile 8x32 at 1M tokens, to which 85.4 % points",
            "?",
            f"MHA {times[0]:.2f} times ring, {1 - named[0].links.rank / rings[0].rank:.1%} less; "
            f"{times[1]:.2f} times with NCCL's multiprocessors taken from the kernels",
        ],
        [
            "1M tokens, mesh against ring",
            "11.9 s against 37.5 s (3.15 times)",
            f"{layers} such layers without anything else: {layers * tile / 1e6:.1f} s against "
            f"{layers * ring / 1e6:.1f} s ({ring / tile:.2f} times); with NCCL's multiprocessors taken from "
            f"the kernels {speed_up(taken, 'mesh'):.2f} times",
        ],
    ]
    return table(["figure", "paper", "here, a tile alone, dgx-h200, causal"], lines)


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


def report(study: Study, machine: Machine, pictures: Mapping[str, str]) -> str:
    parts = [f"# Scaling of attention over long sequences, emulated\n\n{machine.describe()}", INTRO]
    for heads in ("MHA", "GQA"):
        for cluster, speed in CLUSTERS.items():
            for case in study.select(cluster=cluster, heads=heads, ranks=256, seq_len=MILLION, causal=True):
                share = case["ring"].sm_share
                taken = f", exchanges between nodes take {share:.0%} of the multiprocessors" if share else ""
                title = f"### 256 GPUs, 1M tokens, causal, {heads}, {cluster} ({speed}){taken}"
                parts.append(f"{title}\n\n{case_table(case)}")
    parts.insert(2, "## 256 GPUs and a million tokens\n\n" + READING)
    parts.append(f"![a forward of ring and of a tile]({pictures['times']})\n\n{TIMES}")
    parts.append(f"## Beside the paper\n\n{paper_table(study)}\n\n{UNKNOWN}")
    parts.append(
        f"## Lengths at 256 GPUs\n\n{lengths_table(study)}\n\n![bytes]({pictures['bytes']})\n\n{BYTES}"
    )
    parts.append(f"## Strong scaling: a million tokens\n\n![strong scaling]({pictures['strong']})")
    for causal in (True, False):
        for heads in ("MHA", "GQA"):
            for cluster in CLUSTERS:
                mask = "causal" if causal else "full"
                parts.append(
                    f"### {cluster}, {heads}, {mask}\n\n{strong_table(study, cluster, heads, causal)}"
                )
    parts.append(
        f"## Weak scaling: {TOKENS} tokens a GPU\n\n![weak scaling]({pictures['weak']})\n\n"
        "Work a GPU grows with the number of GPUs, because every token sees all before it; shown is the time "
        "over that of its kernels alone."
    )
    parts.append(COMMANDS)
    return "\n\n".join(parts) + "\n"


INTRO = """\
Forward and backward of one attention layer: 32 query heads of 128, 32 (MHA) or 8 (GQA) key/value heads,
bfloat16, batch 1, striped chunks. Nothing here ran on that many GPUs: all ranks are emulated
(`meshattn.plan.timeline`) with the step lists that the library runs, made for the cluster (`topology=`).
Kernel times are those of the `hopper` kernel on one H200 (`block_times.py`): every block shape of every
cut here has been measured, none is extrapolated (half of a block, which some lists compute, lies between
two that were measured). Cuts of the largest blocks, of seconds to minutes, have not been measured and are
left out: "-" where a method has no other. `dgx-h200` has 8 GPUs a node with 370 GB/s each inside and 50
GB/s each between nodes; `a3-high` has 25 GB/s for every two GPUs between nodes. Exchanges cost 10 us
inside a node and 20 or 30 us between nodes, queueing one thing 20 us of the host.

Ring is the tile (1, P), node by node, so that one rank of a node sends to the next node; it has the same
kernel and the cheaper of both types for partial results (bfloat16, as all others). The double ring
passes chunks round the node and once a round from every GPU to the next node; it is emulated at its
best, without a step list of the library. USP is heads x ring. Every method takes its best cut and
placement; of cuts within 1 % of the least time the one that sends least stands in the tables. At 512k and
1M tokens, MHA, lists made for nominal links, instead of for the cluster, would make ring up to 1.4 %
faster and tiles 1 to 29 % slower."""
READING = """\
Sent is what a rank hands to its links, inside or between nodes. A ring crosses the border of a node with
one rank alone, so what leaves a node in all is what one card sends: there a tile saves far less, or
sends more, though no single card sends as much. What matters for time is the busiest card. Kernels alone
is the time of the blocks over the step; the peak is that of the library's buffers and of what the kernel
keeps for itself."""
TIMES = """\
A forward of ring on rank 0, which sends to another node, and on the two behind it, and one of the tile
8x32, whose ranks are all alike. Every step of the ring is as long as the hop between nodes, and all ranks
wait for it."""
BYTES = """\
A tile cuts the bytes of a rank and of the busiest card; the bytes that leave all nodes fall less, or
rise where all cards of a node work instead of one."""
UNKNOWN = """\
Where we agree: one key/value head for each query head, the bytes saved at 256 GPUs, and a factor over
ring of that size, with the tile 8x32 (rows inside a node) or near it. Where not: from 128k to 512k tokens
our factors without grouped heads are up to twice the paper's best, because a ring is then bound by one
card a node and a tile by its kernels; with grouped heads a ring moves a quarter of the bytes, and both
factors shrink below the paper's; it does not say which of its figures have them. A double ring, which it
does not compare with as far as we know, gets most of the time back at the price of the ring's bytes, and
with enough heads USP or a mesh with a head axis is faster than any tile alone. Unknown settings of the
paper: GPUs, cards and nodes; heads and sizes of the model, grouped or not; mask and layout; types of
partial results; what its traffic counts; kernels; whether times are of attention or of a training step.
Its seconds cannot be compared, only their ratio; the seconds above are of one layer times 32."""
COMMANDS = """## Commands

    python benchmarks/block_times.py --out times.json      # on an H200: the kernel table of both presets
    python benchmarks/block_times.py --out times.json --study
    python benchmarks/scaling.py --out scaling.jsonl
    python benchmarks/scaling_report.py scaling.jsonl
    meshattn plan --ranks 256 --seq-len 1M --heads 32 --kv-heads 32 --topology dgx-h200 --reduce-dtype bf16"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=Path, help="what scaling.py has written")
    parser.add_argument("--out", type=Path, default=REPORTS, help="folder of the report")
    args = parser.parse_args(argv)
    study = Study([Row.read(line) for line in args.figures.read_text().splitlines()])
    here = Machine.here()
    machine = Machine("emulated; kernels of 1 x NVIDIA H200", here.versions, here.commit, here.day)
    runs = [(machine, records(study))]
    base = report_path("scaling", runs, args.out).with_suffix("")
    args.out.mkdir(parents=True, exist_ok=True)
    pictures = {what: f"{base.name}-{what}.png" for what in ("strong", "weak", "bytes", "times")}
    draw_strong(study, args.out / pictures["strong"])
    million = Case("dgx-h200", 256, MILLION, "MHA", True)
    draw_two(forwards(million, [Tile(1, 256), Tile(8, 32)]), args.out / pictures["times"])
    draw_weak(study, args.out / pictures["weak"])
    draw_bytes(study, args.out / pictures["bytes"])
    print(f"written to {write('scaling', runs, report(study, machine, pictures), args.out)}")


if __name__ == "__main__":
    main()
