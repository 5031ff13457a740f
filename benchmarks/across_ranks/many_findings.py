"""What the steps of `many_gpus.py` found together: training, predictions, and what was to be shown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from across_ranks.many_steps import PRESET, SOCKETS, TOPOLOGY, Scale
from grounding import Comparison, topologies_of
from harness import Record, table
from meshattn.plan.topology import load_topology

SCALING, LONG = 0.97, 2**17  # of one GPU, with copy engines, from so many tokens on
FROM_BYTES = 0.1  # how far times over slow links may be from what bytes say


def training(out: Path, records: list[Record]) -> str:
    """Tokens a second of both runs, and how far their losses are apart; its figures become records."""
    runs = {}
    for kind in ("mesh", "ring"):
        log = out / f"train-{kind}" / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        runs[kind] = [json.loads(line) for line in lines]
    said = []
    for kind, run in runs.items():
        if len(run) > 1:
            pace = statistics.median(one["tokens"] / one["seconds"] for one in run[1:])
            records.append(Record("many-gpus", f"train-{kind}", "tokens/s", pace))
            said.append(f"{kind}: {pace:,.0f} tokens/s, loss {run[0]['loss']:.4f} to {run[-1]['loss']:.4f}")
    apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(*runs.values(), strict=False)]
    if apart:
        records.append(Record("many-gpus", "train", "largest loss difference", max(apart), "ring"))
        said.append(f"The losses of their {len(apart)} first steps differ by {max(apart):.1e} at most.")
    return "\n".join(said)


def comparisons(out: Path, scale: Scale) -> dict[str, Comparison]:
    """By step, what the emulator says of its tables, on the topologies that were measured beside them, or on
    that of the preset on GPUs like its. Passes over NCCL are left out where only the links of another
    transport are known."""
    if not scale.real and not _measured(out):
        return {}
    here = load_topology(out / TOPOLOGY if _measured(out) else PRESET)
    nccl = load_topology(out / SOCKETS) if (out / SOCKETS).exists() else here
    link = nccl.inside if nccl.between is None else nccl.between
    fast = topologies_of(here, link)
    if nccl is here and scale.transports != "p2p":
        del fast["p2p"]
    slow = topologies_of(here, replace(link, gb_per_s=scale.rate / 1e3))
    by_step = {"tables": fast, "slow-links": slow, "million": fast}
    found = {name: Comparison.of(_records(out / name), known) for name, known in by_step.items()}
    return {name: one for name, one in found.items() if one.rows}


def predictions(found: Mapping[str, Comparison], out: Path) -> str:
    """The tables of `comparisons`."""
    parts = [f"### {name}\n\n{one.text()}" for name, one in found.items()]
    if parts and not _measured(out):
        parts.insert(0, f"Links and kernels were not measured; these are those of the preset {PRESET}.")
    return "\n\n".join(parts)


def marks(out: Path, scale: Scale, found: Mapping[str, Comparison], steps: Container[str]) -> str:
    """What was to be shown, what is wanted, and what these steps found: others may have left figures of an
    earlier run."""
    rows = [*_marks(out, scale, found, steps)]
    return table(["measure", "wanted", "found"], rows) if rows else ""


def _marks(
    out: Path, scale: Scale, found: Mapping[str, Comparison], steps: Container[str]
) -> Iterator[tuple[str, str, str]]:
    """Where ranks share GPUs, of times only those over slow links tell anything."""
    if "self-test" in steps:
        yield from _tested(out / "self-test")
    if scale.real and "tables" in steps:
        yield from _scaling(out / "tables")
        if "tables" in found:
            right, pairs = found["tables"].order
            yield "tables: pairs of cuts in the predicted order", f"{pairs}", f"{right}"
    if "slow-links" in steps:
        yield from _slow(out / "slow-links")


def _tested(folder: Path) -> Iterator[tuple[str, str, str]]:
    found = {record["metric"]: record["ours"] for record in _records(folder)}
    if "wrong cases" in found:
        left = found.get("meshes left", 0)
        untested = f", but {left:.0f} meshes were not tested" if left else ""
        yield "self-test: wrong cases", "0", f"{found['wrong cases']:.0f}{untested}"


def _scaling(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Of the fastest cut and of the ring; of lengths that are too short nothing is wanted."""
    shares: dict[int, dict[str, float]] = {}
    for record in _records(folder):
        where, _, name = str(record["case"]).partition("-P")
        length = int(where.split("-")[1].removeprefix("S"))
        both = record["metric"] == "both TFLOP/s per rank" and record["peer"] == "one GPU"
        if both and name.endswith("-symmetric") and record["ratio"]:
            shares.setdefault(length, {})[name.split("-")[1]] = record["ratio"]
    for length, cuts in shares.items():
        ring, best = next(iter(cuts)), max(cuts, key=lambda cut: cuts[cut])
        told = f"{cuts[best]:.3f} ({best}; {ring} {cuts[ring]:.3f})"
        wanted = f"{SCALING}" if length >= LONG else ""
        yield f"{length:,} tokens: fastest cut / one GPU, copy engines", wanted, told


def _slow(folder: Path) -> Iterator[tuple[str, str, str]]:
    """The tile whose time of ring's is farthest from its bytes of ring's."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for record in _records(folder):
        direction, _, what = str(record["metric"]).partition(" ")
        if what in ("time of ring's", "bytes of ring's"):
            found.setdefault((str(record["case"]), direction), {})[what.split()[0]] = record["ours"]
    apart = {key: one["time"] / one["bytes"] - 1 for key, one in found.items()}
    if apart:
        (case, direction), worst = max(apart.items(), key=lambda item: abs(item[1]))
        tile = case.rpartition("-P")[2].split("-")[1]
        told = f"{worst:+.1%} ({tile} {direction})"
        yield "slow links: time of ring's beyond bytes of ring's", f"within {FROM_BYTES:.0%}", told


def _records(folder: Path) -> list[dict[str, Any]]:
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def _measured(out: Path) -> bool:
    return (out / TOPOLOGY).exists()
