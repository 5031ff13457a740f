"""The report of the scaling study, from the figures that scaling.py has written.

python benchmarks/scaling_report.py scaling.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import REPORTS, Machine, report_path, write
from meshattn.plan.assignment import Tile
from scaling import TOKENS, Case, Figures, forwards
from study.scaling_pictures import draw_bytes, draw_strong, draw_two, draw_weak
from study.scaling_rows import MILLION, Study, records
from study.scaling_tables import CLUSTERS, case_table, lengths_table, pace_text, paper_table, strong_table


def report(study: Study, machine: Machine, pictures: Mapping[str, str]) -> str:
    title = f"# Scaling of attention over long sequences, emulated\n\n{machine.describe()}"
    parts = [title, f"{INTRO} {pace_text()}"]
    for heads in ("MHA", "GQA"):
        for cluster, speed in CLUSTERS.items():
            for case in study.select(cluster=cluster, heads=heads, ranks=256, seq_len=MILLION, causal=True):
                share = case["ring"].case.sm_share
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
left out: "-" where a method has no other. All but the six largest blocks were measured before the last
changes of the kernels (525 TFLOP/s in blocks of 8k rows that merge into earlier ones under a full mask,
584 after). `dgx-h200` has 8 GPUs a node with 370 GB/s each inside and 50 GB/s each between nodes;
`a3-high` has 25 GB/s for every two GPUs between nodes. Exchanges cost 10 us inside a node and 20 or 30 us
between nodes, queueing one thing 20 us of the host.

Ring is the tile (1, P), node by node, so that one rank of a node sends to the next node; it has the same
kernel and the cheaper of both types for partial results (bfloat16, as all others). The double ring
passes chunks round the node and once a round from every GPU to the next node; it is emulated at its
best, without a step list of the library. USP is heads x ring. Every method takes its best cut and
placement; of cuts within 1 % of the least time the one that sends least stands in the tables."""
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
    study = Study([Figures.read(line) for line in args.figures.read_text().splitlines()])
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
