"""A timeline as a trace that Perfetto and chrome://tracing show: a process a rank, a thread a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .timeline import Timeline

LANES = {"compute": "kernels", "node": "exchanges inside the node", "net": "exchanges between nodes"}


def trace_events(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Of recorded passes, one after the other; one rank of each kind."""
    events: list[dict[str, Any]] = []
    named: set[tuple[int, str]] = set()
    start = 0.0
    for timeline in timelines:
        for event in timeline.events:
            lane = list(LANES).index(event.lane)
            for what, key, name in (
                ("process_name", (event.rank, ""), f"rank {event.rank}"),
                ("thread_name", (event.rank, event.lane), LANES[event.lane]),
            ):
                if key not in named:
                    named.add(key)
                    entry = {"ph": "M", "name": what, "pid": event.rank, "tid": lane}
                    events.append({**entry, "args": {"name": name}})
            more = {} if event.lane == "compute" else {"bytes": event.num_bytes, "to rank": event.peer}
            events.append(
                {
                    "ph": "X",
                    "name": event.name,
                    "cat": event.lane,
                    "pid": event.rank,
                    "tid": lane,
                    "ts": start + event.begin,
                    "dur": event.end - event.begin,
                    "args": more,
                }
            )
        start += timeline.total_us
    return events


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Write ``trace_events`` of recorded passes as a JSON file."""
    what = [timeline.script.name for timeline in timelines]
    data = {"traceEvents": trace_events(timelines), "displayTimeUnit": "ms", "otherData": {"passes": what}}
    path.write_text(json.dumps(data))
