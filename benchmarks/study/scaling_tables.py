"""The tables of the scaling study."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from harness import table
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import NOMINAL
from scaling import METHODS, NCCL_SHARE, Case, Figures, one_tile
from study.scaling_rows import MILLION, NAMES, Study, less_sent, speed_up

CLUSTERS = {"dgx-h200": "50 GB/s a GPU", "a3-high": "25 GB/s for two GPUs"}


TILES = [Tile(1, 256), Tile(4, 64), Tile(8, 32), Tile(16, 16), Tile(32, 8)]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def case_table(found: Mapping[str, Figures]) -> str:
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
    found = sorted(found, key=lambda case: case["ring"].case.ranks)
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
                str(case["ring"].case.ranks),
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
            for case in sorted(cases, key=lambda case: case["ring"].case.seq_len):
                tile, both = case["mesh"], case["mesh+heads"]
                lines.append(
                    [
                        cluster,
                        heads,
                        f"{tile.case.seq_len // 1024}k",
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

    def cases(heads: str) -> list[Mapping[str, Figures]]:
        found = study.select(cluster="dgx-h200", heads=heads, causal=True, ranks=256, sm_share=0.0)
        return sorted(found, key=lambda case: case["ring"].case.seq_len)

    mha, gqa = cases("MHA"), cases("GQA")
    million = next(case for case in mha if case["ring"].case.seq_len == MILLION)
    (taken,) = (
        case
        for case in study.select(cluster="dgx-h200", heads="MHA", seq_len=MILLION, ranks=256)
        if case["ring"].case.sm_share
    )

    def both(value: Any) -> str:
        return f"MHA {value(mha)}, GQA {value(gqa)}"

    def best_speed(found: Sequence[Mapping[str, Figures]]) -> str:
        return f"{max(speed_up(case, 'mesh') for case in found):.2f}"

    def mean_speed(found: Sequence[Mapping[str, Figures]]) -> str:
        return f"{statistics.mean(speed_up(case, 'mesh') for case in found):.2f}"

    def best_saved(found: Sequence[Mapping[str, Figures]]) -> str:
        return f"{max(less_sent(case, 'mesh') for case in found):.1%}"

    def mean_saved(found: Sequence[Mapping[str, Figures]]) -> str:
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


def pace_text() -> str:
    """What lists made for nominal links would change at 256 GPUs."""
    changed: dict[str, list[float]] = {"ring": [], "tiles": []}
    for cluster, seq_len, tile in product(CLUSTERS, (MILLION // 2, MILLION), TILES):
        case = Case(cluster, 256, seq_len, "MHA", True)
        nominal, paced = (one_tile(case, tile, pace).total_us for pace in (NOMINAL, None))
        changed["ring" if tile.a == 1 else "tiles"].append(100 * (nominal / paced - 1))
    said = (f"{name} by {min(each):+.1f} to {max(each):+.1f} %" for name, each in changed.items())
    return (
        f"Lists made for nominal links,\ninstead of for the cluster, would change the time of "
        f"{' and of '.join(said)}\n({', '.join(map(str, TILES[1:]))}; 256 GPUs, 512k and 1M tokens, MHA)."
    )
