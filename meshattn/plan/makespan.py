"""The time model: how long a step list takes when blocks and transfers have given costs.

Compute is one stream: waits, merges and blocks in list order, a wait delays it to the arrival. Each channel
runs its transfers one at a time in list order; a transfer starts when its channel is free, the data it sends
is there and its receive slot is free. It does not wait for unrelated compute. All ranks run the same list, so
one rank tells all.
"""

from __future__ import annotations

from collections import defaultdict

from .assignment import Axis
from .schedule import Channels, Costs, Payload, Schedule

Line = tuple[Axis, int]


def channel_of(axis: Axis, channels: Channels) -> str:
    """Name of the serial channel that carries the transfers of an axis."""
    return "all" if channels == "shared" else axis


def makespan(schedule: Schedule, costs: Costs, channels: Channels = "shared") -> int:
    """Time from the start to the last block, merge and arrival, in the units of ``costs``."""
    now = 0
    channel_free: dict[str, int] = defaultdict(int)
    arrival: dict[int, int] = {}
    chunk_there: dict[tuple[Payload, int], int] = {}
    line_done: dict[Line, int] = defaultdict(int)  # last block or merge of a row or a column so far
    chunk_slot_free: dict[Line, int] = defaultdict(int)  # (axis, slot) of the chunk pools
    recv_slot_free: dict[Line, int] = defaultdict(int)
    for step in schedule.steps:
        for number in step.waits:
            now = max(now, arrival[number])
        for merge in step.merges:
            now += costs.merge
            axis: Axis = "col" if merge.payload == "dkv" else "row"
            line_done[axis, merge.index] = recv_slot_free[axis, merge.recv_slot] = now
        for t in step.transfers:
            channel = channel_of(t.axis, channels)
            if t.inward:
                ready = chunk_there[t.payload, t.sent] if t.sent else 0
                ready = max(ready, chunk_slot_free[t.axis, t.recv_slot])
            else:
                ready = max(line_done[t.axis, t.sent], recv_slot_free[t.axis, t.recv_slot])
            end = max(channel_free[channel], ready) + costs.of(t.payload)
            channel_free[channel] = arrival[t.number] = end
            if t.inward:
                chunk_there[t.payload, t.received] = end
                slot = (t.axis, t.send_slot)
                chunk_slot_free[slot] = max(chunk_slot_free[slot], end)
        for block in step.blocks:
            now += costs.of_block(block.parts)
            line_done["row", block.row] = line_done["col", block.col] = now
            chunk_slot_free["row", block.row_slot] = max(chunk_slot_free["row", block.row_slot], now)
            chunk_slot_free["col", block.col_slot] = max(chunk_slot_free["col", block.col_slot], now)
    return max([now, *arrival.values()])
