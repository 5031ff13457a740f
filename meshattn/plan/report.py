"""Figures and words about step lists, for the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .assignment import Assignment, Tile
from .bound import lower_bound, tight_bound
from .cost import CallShape, costs, payload_bytes, peak_memory, total_bytes
from .greedy import build
from .makespan import makespan
from .schedule import AXIS, Channels, Costs, Direction, Payload, Step

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
CHANNELS: tuple[Channels, Channels] = ("shared", "per_axis")
# Block time / query chunk time: from where only the links count to where only the kernels do.
RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
CHUNK_WORDS: dict[Payload, str] = {
    "q": "Q",
    "kv": "KV",
    "out": "out of Q",
    "bundle": "Q, do, lse, delta of Q",
    "dq": "dq of Q",
    "dkv": "dkv of KV",
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Time of a list over the plain and over the tight bound; ``time`` and ``bound`` in query chunk times."""

    plain: float
    tight: float
    time: float
    bound: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Row:
    """One tile, at one ratio or (None) at the worst of all ratios for each pass and channel model."""

    tile: Tile
    ratio: float | None
    quality: dict[tuple[Direction, Channels], Quality]
    num_steps: dict[Direction, int]
    sent_bytes: dict[Direction, int]
    peak_bytes: dict[Direction, int]

    def as_json(self) -> dict[str, object]:
        """The row in types that JSON knows."""
        quality = [
            {"direction": direction, "channels": channels, **asdict(figures)}
            for (direction, channels), figures in self.quality.items()
        ]
        return {
            "tile": str(self.tile),
            "ratio": self.ratio,
            "quality": quality,
            "num_steps": self.num_steps,
            "sent_bytes": self.sent_bytes,
            "peak_bytes": self.peak_bytes,
        }


def costs_at(direction: Direction, shape: CallShape, ratio: float) -> Costs:
    """Costs of a shape with the block time set to ``ratio`` times that of a query chunk on the link."""
    base = costs(direction, shape)
    return Costs(
        block=max(1, round(ratio * payload_bytes("q", shape))),
        row_in=base.row_in,
        col_in=base.col_in,
        row_out=base.row_out,
        col_out=base.col_out,
    )


def quality(direction: Direction, tile: Tile, shape: CallShape, channels: Channels, ratio: float) -> Quality:
    """How near the list of a tile comes to the bounds."""
    at = costs_at(direction, shape, ratio)
    unit = payload_bytes("q", shape)
    time = makespan(build(direction, tile, at, channels), at, channels)
    bound = lower_bound(direction, tile, at, channels)
    return Quality(
        plain=time / bound,
        tight=time / tight_bound(direction, tile, at, channels),
        time=time / unit,
        bound=bound / unit,
        ratio=ratio,
    )


def _row(tile: Tile, shape: CallShape, ratios: Iterable[float], ratio: float | None) -> Row:
    figures = {
        (direction, channels): max(
            (quality(direction, tile, shape, channels, each) for each in ratios), key=lambda q: q.plain
        )
        for direction in DIRECTIONS
        for channels in CHANNELS
    }
    return Row(
        tile=tile,
        ratio=ratio,
        quality=figures,
        num_steps={d: len(build(d, tile, costs(d, shape)).steps) for d in DIRECTIONS},
        sent_bytes={d: total_bytes(d, tile, shape) for d in DIRECTIONS},
        peak_bytes={d: peak_memory(d, tile, shape) for d in DIRECTIONS},
    )


def worst_row(tile: Tile, shape: CallShape) -> Row:
    """The worst figures of a tile over ``RATIOS``."""
    return _row(tile, shape, RATIOS, None)


def rows_at(tile: Tile, shape: CallShape, ratios: Iterable[float]) -> list[Row]:
    """The figures of a tile at each ratio."""
    return [_row(tile, shape, (ratio,), ratio) for ratio in ratios]


def describe_step(step: Step, plan: Assignment, rank: int) -> str:
    """A step as rank ``rank`` sees it, in global chunk numbers."""

    def chunk(payload: Payload, k: int) -> str:
        number = plan.query_chunk(rank, k) if AXIS[payload] == "row" else plan.key_chunk(rank, k)
        return f"{CHUNK_WORDS[payload]}{number}"

    words = []
    if step.waits:
        words.append("wait for " + " ".join(f"#{n}" for n in step.waits))
    words += [f"merge {chunk(m.payload, m.index)} from #{m.transfer}" for m in step.merges]
    for t in step.transfers:
        to, source = (plan.neighbour(rank, t.axis, offset) for offset in (t.offset, -t.offset))
        words.append(
            f"#{t.number}: send {chunk(t.payload, t.sent)} to {to}, "
            f"receive {chunk(t.payload, t.received)} from {source}"
        )
    if step.blocks:
        pairs = (
            f"Q{plan.query_chunk(rank, b.row)}-KV{plan.key_chunk(rank, b.col)}"
            + (f" (part {b.part + 1} of {b.parts})" if b.parts > 1 else "")
            for b in step.blocks
        )
        words.append("compute " + " ".join(pairs))
    return "; ".join(words)
