"""The table and the records of what was timed on several ranks."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from across_ranks.rank_contenders import Case
from across_ranks.rank_cuts import DIRECTIONS
from across_ranks.rank_memory import Memory
from across_ranks.rank_turns import PASSES, Turn, beyond, column
from harness import Machine, Record, Timing, table, write

INTRO = (
    "All contenders take turns in which forward and backward passes follow each other, as in training; a "
    "time is that of the slowest rank, the median over rounds (middle three fifths). Exposed is what a tile "
    "takes beyond the same kernels without transfers and without the host, as a CUDA graph if there is one, "
    "paired within each round. Bytes are sent per rank. The "
    "column of one GPU compares TFLOP/s per GPU with one rank alone that has as many products. The second "
    "table gives what a tile takes and sends as parts of ring's on the same transport; where links are the "
    "limit, the two agree. WxAxB is a head axis of W ranks around the tile AxB, and a number behind the "
    "transport says into how many groups its heads are split, if not what auto takes. Plain is the same tile "
    "over send and receive as PyTorch gives them: no stream of high priority, no head start, no room on the "
    "GPU. Awake is the same beside pushes of 16 MiB in every pass, for which nothing waits: they keep the "
    "links between the GPUs awake, which takes power that kernels have as long as nothing moves. The peak is "
    "what both passes take beyond q, k, v and do; its formula has the buffers, out with its lse and delta, "
    "and the gradients or what the kernel keeps for itself. Every tile was checked on every transport "
    "against float64 dense attention first."
)


@dataclass(frozen=True)
class Result:
    """Of one case."""

    case: Case
    turns: dict[str, list[Turn]]
    sent: dict[str, dict[str, int]]  # by contender and direction, counted by the transport in one pass
    formula: dict[str, dict[str, int]]
    memory: dict[str, Memory]
    flop: dict[str, dict[str, float]]  # of one rank, by contender and pass
    absent: dict[str, str]  # contenders that could not run, and why


def _base(name: str, turns: dict[str, list[Turn]]) -> str | None:
    """The same tile without transfers, captured if any is: the mesh records none of its passes."""
    tile, kind, *_ = f"{name} ".split(" ")
    bases = (f"{tile} skipped graph", f"{tile} skipped")
    return next((base for base in bases if base in turns and kind != "skipped"), None)


def awake_bases(name: str, turns: dict[str, list[Turn]]) -> tuple[str | None, str | None]:
    """For a tile with transfers: the same without them, and one GPU, while links are awake, where timed."""
    tile, kind, *more = f"{name} ".split(" ")
    if tile == "torch" or kind in ("skipped", "GPU") or more != [""]:
        return None, None
    found = [base if base in turns else None for base in (f"{tile} skipped awake", "one GPU awake")]
    return found[0], found[1]


def of_plain(turns: dict[str, list[Turn]], name: str, step: str) -> float | None:
    """What "p2p" exposes of what plain send and receive do; None for other contenders, and without those."""
    plain = name.replace(" p2p", " plain")
    if plain == name or plain not in turns:
        return None
    base = _base(name, turns)
    if base is None:
        return None
    mine, plains = (statistics.median(beyond(turns, x, base, step)) for x in (name, plain))
    return mine / plains


def _alone(name: str, turns: dict[str, list[Turn]]) -> str | None:
    """One GPU alone, captured if the contender is."""
    alone = "one GPU graph" if name.endswith(" graph") else "one GPU"
    return alone if alone in turns else None


def _rate(result: Result, name: str, step: str) -> float:
    """TFLOP/s of one rank."""
    return result.flop[name][step] / statistics.median(column(result.turns[name], step)) / 1e9


def table_of(result: Result) -> str:
    """A heading and one line a contender."""
    head = ["contender", "forward ms", "backward ms", "TFLOP/s fwd", "bwd", "both", "of one GPU"]
    head += ["exposed us fwd", "bwd", "% of fwd", "of bwd", "of both", "host ms", "MiB sent fwd", "bwd"]
    head += ["buffers MiB", "peak MiB", "of formula"]
    rows = []
    for name, turns in result.turns.items():
        base = _base(name, result.turns)
        exposed = [""] * 5
        if base is not None:
            lost = [Timing.of(beyond(result.turns, name, base, p)) for p in PASSES]
            took = [statistics.median(column(result.turns[base], p)) for p in PASSES]
            exposed = [f"{x.median * 1e3:.0f} ({x.low * 1e3:.0f}..{x.high * 1e3:.0f})" for x in lost[:2]]
            exposed += [f"{x.median / spent:.1%}" for x, spent in zip(lost, took, strict=True)]
        share = ""
        if limit := _alone(name, result.turns):
            share = f"{_of(result, name, limit):.3f}"
        sent = result.sent.get(name, {})
        rows.append(
            [
                name,
                *(_milliseconds(column(turns, p)) for p in DIRECTIONS),
                *(f"{_rate(result, name, p):.0f}" for p in PASSES),
                share,
                *exposed,
                f"{statistics.median(column(turns, 'host')):.2f}",
                *(_mib(sent[p]) if sent.get(p) else "" for p in DIRECTIONS),
                *_of_memory(result.memory.get(name)),
            ]
        )
    parts = [f"## {result.case}", table(head, rows), _table_of_ratios(result), *_sentences(result)]
    return "\n\n".join(filter(None, parts))


def _of_memory(memory: Memory | None) -> list[str]:
    """Buffers, the peak, and the peak as a part of the formula's."""
    if memory is None:
        return [""] * 3
    peak = [_mib(memory.peak), f"{memory.peak / memory.expected:.3f}"] if memory.peak else [""] * 2
    return [_mib(memory.buffers), *peak]


def _exposed(turns: dict[str, list[Turn]], name: str, base: str, step: str) -> float:
    """What a contender takes beyond another one, as a part of what that takes."""
    return statistics.median(beyond(turns, name, base, step)) / statistics.median(column(turns[base], step))


def _of(result: Result, name: str, limit: str, step: str = "both") -> float:
    """TFLOP/s of one contender as a part of another's."""
    return _rate(result, name, step) / _rate(result, limit, step)


def _sentences(result: Result) -> list[str]:
    """What stands in no table."""
    said = [f"{name} could not run: {why}" for name, why in result.absent.items()]
    for name in result.turns:
        found = [part for step in PASSES if (part := of_plain(result.turns, name, step)) is not None]
        if found:
            parts = ", ".join(f"{part:.2f} of {step}" for part, step in zip(found, PASSES, strict=True))
            said.append(f"Of what plain exposes, {name} exposes {parts}.")
        still, limit = awake_bases(name, result.turns)
        if still is not None:
            shares = [_exposed(result.turns, name, still, step) for step in PASSES]
            parts = ", ".join(f"{part:.1%} of {step}" for part, step in zip(shares, PASSES, strict=True))
            of_one = "" if limit is None else f", {_of(result, name, limit):.3f} of one GPU"
            said.append(f"Beside kernels whose GPUs have their links awake, {name} exposes {parts}{of_one}.")
    return said


@dataclass(frozen=True)
class AgainstRing:
    """A pass of a tile, as parts of what ring takes and sends on the same transport."""

    ring: str
    time: Timing  # of the ratios of the rounds, no milliseconds
    sent: float

    @property
    def beyond_bytes(self) -> float:
        """How much more of ring's time it takes than of ring's bytes, relative."""
        return self.time.median / self.sent - 1


def against_ring(result: Result, name: str, step: str) -> AgainstRing | None:
    """None for a contender that sends nothing, and for ring itself."""
    tile, _, kind = name.partition(" ")
    ring = f"1x{dist.get_world_size()} {re.sub('/[0-9]+', '', kind)}"  # without its head groups
    if tile == ring.partition(" ")[0] or not (name in result.sent and ring in result.sent):
        return None
    pairs = zip(column(result.turns[name], step), column(result.turns[ring], step), strict=True)
    sent = result.sent[name][step] / result.sent[ring][step]
    return AgainstRing(ring, Timing.of([mine / rings for mine, rings in pairs]), sent)


def _table_of_ratios(result: Result) -> str:
    """Where links are the limit, the two ratios of a pass agree; empty without a tile beside ring."""
    head = ["of ring's", *(f"{what} {step}" for step in DIRECTIONS for what in ("time", "bytes", "apart"))]
    rows = []
    for name in result.turns:
        found = [x for step in DIRECTIONS if (x := against_ring(result, name, step))]
        cells = [
            cell
            for x in found
            for cell in (
                f"{x.time.median:.3f} ({x.time.low:.3f}-{x.time.high:.3f})",
                f"{x.sent:.3f}",
                f"{x.beyond_bytes:+.1%}",
            )
        ]
        if found:
            rows.append([name, *cells])
    return table(head, rows) if rows else ""


def _milliseconds(samples: Sequence[float]) -> str:
    timing = Timing.of(samples)
    return f"{timing.median:.3f} ({timing.low:.3f}-{timing.high:.3f})"


def _records(result: Result) -> list[Record]:
    records = []
    for name, turns in result.turns.items():
        label = f"{result.case}-P{dist.get_world_size()}-{name.replace(' ', '-')}"
        base = _base(name, result.turns)
        for step in PASSES:
            timing = Timing.of(column(turns, step))
            records.append(Record("distributed", label, f"{step} ms", timing.median, spread=timing.spread))
            peer, ratio = None, None
            if (limit := _alone(name, result.turns)) and name != limit:
                peer, ratio = limit, _of(result, name, limit, step)
            rate = _rate(result, name, step)
            records.append(Record("distributed", label, f"{step} TFLOP/s per rank", rate, peer, ratio))
            if base is not None:
                lost = statistics.median(beyond(result.turns, name, base, step))
                share = _exposed(result.turns, name, base, step)
                records.append(
                    Record("distributed", label, f"{step} exposed ms", lost, "without transfers", share)
                )
                if (ratio := of_plain(result.turns, name, step)) is not None:
                    records.append(Record("distributed", label, f"{step} exposed ms", lost, "plain", ratio))
            still, limit = awake_bases(name, result.turns)
            if still is not None:
                lost = statistics.median(beyond(result.turns, name, still, step))
                share = _exposed(result.turns, name, still, step)
                records.append(Record("distributed", label, f"{step} exposed ms", lost, still, share))
            if limit is not None:
                ratio = _of(result, name, limit, step)
                records.append(Record("distributed", label, f"{step} TFLOP/s per rank", rate, limit, ratio))
        for step in DIRECTIONS:
            if ratios := against_ring(result, name, step):
                for metric, value in (("time", ratios.time.median), ("bytes", ratios.sent)):
                    text = f"{step} {metric} of ring's"
                    spread = ratios.time.spread if metric == "time" else None
                    records.append(Record("distributed", label, text, value, ratios.ring, value, spread))
        if (memory := result.memory.get(name)) and memory.peak:
            ratio = memory.peak / memory.expected
            records.append(Record("distributed", label, "peak bytes", memory.peak, "formula", ratio))
        for step, measured in result.sent.get(name, {}).items():
            formula = result.formula[name][step]
            ratio = measured / formula if formula else None
            records.append(Record("distributed", label, f"{step} bytes", measured, "formula", ratio))
    return records


def write_report(results: Sequence[Result], folder: Path, commit: str | None = None) -> Path:
    """The report of all cases and its records; returns where it lies."""
    machine, ranks = Machine.here(commit=commit), dist.get_world_size()
    text = "\n\n".join(
        [f"# Ring and mesh tiles, {ranks} ranks", machine.describe(), INTRO, *map(table_of, results), ""]
    )
    records = [record for result in results for record in _records(result)]
    name = f"distributed-{ranks}-ranks" + ("-gpu" if torch.cuda.is_available() else "")
    name += "-virtual" if "VIRTUAL_CLUSTER" in os.environ else ""
    return write(name, [(machine, records)], text, folder)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"
