"""Cut an order of transfers, merges and blocks into steps: slots, waits and last uses follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .assignment import Axis, Tile
from .schedule import (
    AXIS,
    INWARD,
    Block,
    Direction,
    Merge,
    Payload,
    Schedule,
    Slots,
    Step,
    Transfer,
    chunk_slot,
)


@dataclass(frozen=True, slots=True)
class Event:
    """What starts at ``time``: a block (row, col), transfer ``index`` of a payload, or the merge after it."""

    time: int
    kind: Literal["block", "transfer", "merge"]
    payload: Payload | None = None
    index: int = 0
    row: int = 0
    col: int = 0
    part: int = 0
    parts: int = 1


class _Cutter:
    """The list under construction; each event opens a new step where the order inside a step forces it."""

    def __init__(self, direction: Direction, tile: Tile, direct: frozenset[Axis]) -> None:
        self.direction: Direction = direction
        self.tile = tile
        self.direct = direct
        self.slots = Slots.of(direction, tile)
        self.waits: list[list[int]] = []
        self.merges: list[list[Merge]] = []
        self.transfers: list[list[Transfer]] = []
        self.blocks: list[list[Block]] = []
        self.time = -1
        self.number: dict[tuple[Payload, int], int] = {}
        self.waited: dict[int, int] = {}  # transfer number -> step of its wait
        self.used: dict[tuple[Payload, int], int] = {}  # received chunk or partial -> last step that reads it
        self.inward: dict[Axis, Payload] = {"row": "q" if direction == "forward" else "bundle", "col": "kv"}
        self.outward: dict[Axis, Payload] = {"row": "out" if direction == "forward" else "dq"}
        if direction == "backward":
            self.outward["col"] = "dkv"

    def _place(self, event: Event, needs: Iterable[tuple[Payload, int]]) -> int:
        """The step that takes the event, after the waits for what it needs."""
        missing = [n for n in dict.fromkeys(self.number[need] for need in needs) if n not in self.waited]
        if (
            not self.waits
            or (missing and (self._started(event.time) or self._just_started(missing)))
            or (event.kind == "merge" and (self.transfers[-1] or self.blocks[-1]))
            or (event.kind == "transfer" and (self._started(event.time) or self._meets_twin(event)))
        ):
            for part in (self.waits, self.merges, self.transfers, self.blocks):
                part.append([])
        step = len(self.waits) - 1
        self.time = event.time
        for number in missing:
            self.waits[step].append(number)
            self.waited[number] = step
        return step

    def _started(self, time: int) -> bool:
        """Whether the open step holds work that an event of ``time`` must not hold up or jump."""
        anything = self.merges[-1] or self.transfers[-1]
        return bool(self.blocks[-1]) or (bool(anything) and time != self.time)

    def _just_started(self, numbers: list[int]) -> bool:
        """Whether a transfer starts in the open step: its wait must come later, even if it is free."""
        return any(t.number in numbers for t in self.transfers[-1])

    def _meets_twin(self, event: Event) -> bool:
        assert event.payload is not None
        way, axis = event.payload in INWARD, AXIS[event.payload]
        return any(t.inward == way and t.axis == axis for t in self.transfers[-1])

    def _acc(self, axis: Axis, k: int) -> int:
        slots = self.slots.row_acc if axis == "row" else self.slots.col_acc
        return chunk_slot(k, slots) if slots else -1

    def _pool(self, axis: Axis) -> int:
        return self.slots.row if axis == "row" else self.slots.col

    def _line_needs(self, axis: Axis, k: int) -> list[tuple[Payload, int]]:
        """A block of line #k needs its chunk, and its accumulator slot back from the line before."""
        needs: list[tuple[Payload, int]] = [(self.inward[axis], k)] if k else []
        if axis in self.outward:
            before = k - (self._pool(axis) - 1)
            if before > 0 and self._acc(axis, before) == self._acc(axis, k):
                needs.append((self.outward[axis], before))
        return needs

    def block(self, event: Event) -> None:
        row, col = event.row, event.col
        step = self._place(event, [*self._line_needs("row", row), *self._line_needs("col", col)])
        self.used[self.inward["row"], row] = self.used[self.inward["col"], col] = step
        self.blocks[step].append(
            Block(
                row=row,
                col=col,
                row_slot=chunk_slot(row, self.slots.row),
                col_slot=chunk_slot(col, self.slots.col),
                row_acc=self._acc("row", row),
                col_acc=self._acc("col", col),
                part=event.part,
                parts=event.parts,
            )
        )

    def merge(self, event: Event) -> None:
        payload, k = event.payload, event.index
        assert payload is not None
        step = self._place(event, [(payload, k)])
        self.used[payload, k] = step
        axis = AXIS[payload]
        line = 0 if axis in self.direct else (k + 1) % self.tile.size(axis)
        self.merges[step].append(
            Merge(
                payload=payload,
                index=line,
                transfer=self.number[payload, k],
                recv_slot=self._recv_slot(payload, k),
                acc=self._acc(axis, line),
            )
        )

    def _recv_slot(self, payload: Payload, k: int) -> int:
        axis = AXIS[payload]
        if payload in INWARD:
            return chunk_slot(k, self._pool(axis))
        return (k - 1) % (self.slots.row_recv if axis == "row" else self.slots.col_recv)

    def transfer(self, event: Event) -> None:
        payload, k = event.payload, event.index
        assert payload is not None
        axis, inward = AXIS[payload], payload in INWARD
        if axis in self.direct:
            sent, received, offset = (0, k, -k) if inward else (k, 0, k)
        elif inward:
            sent, received, offset = k - 1, k, -1
        else:
            sent, received, offset = k, (k + 1) % self.tile.size(axis), -1
        # Inward hands on what arrived last. Outward needs no wait: the merge before it had it.
        step = self._place(event, [(payload, sent)] if inward and sent else [])
        number = len(self.number)
        self.number[payload, k] = number
        self.transfers[step].append(
            Transfer(
                number=number,
                payload=payload,
                index=k,
                sent=sent,
                received=received,
                offset=offset,
                send_slot=chunk_slot(sent, self._pool(axis)) if inward else self._acc(axis, sent),
                recv_slot=self._recv_slot(payload, k),
                last_use=-1,
            )
        )

    def finish(self) -> Schedule:
        rest = [n for n in range(len(self.number)) if n not in self.waited]
        if rest:
            for part in (self.waits, self.merges, self.transfers, self.blocks):
                part.append([])
            self.waits[-1].extend(rest)
            self.waited.update(dict.fromkeys(rest, len(self.waits) - 1))
        steps = tuple(
            Step(
                waits=tuple(waits),
                merges=tuple(merges),
                transfers=tuple(self._with_last_use(t) for t in transfers),
                blocks=tuple(blocks),
            )
            for waits, merges, transfers, blocks in zip(
                self.waits, self.merges, self.transfers, self.blocks, strict=True
            )
        )
        return Schedule(self.direction, self.tile, self.slots, steps, self.direct)

    def _with_last_use(self, t: Transfer) -> Transfer:
        last = self.used[t.payload, t.index]
        handed_on = t.inward and t.axis not in self.direct
        onward = self.number.get((t.payload, t.index + 1)) if handed_on else None
        if onward is not None:
            last = max(last, self.waited[onward])
        return Transfer(
            number=t.number,
            payload=t.payload,
            index=t.index,
            sent=t.sent,
            received=t.received,
            offset=t.offset,
            send_slot=t.send_slot,
            recv_slot=t.recv_slot,
            last_use=last,
        )


def cut(
    direction: Direction, tile: Tile, order: Iterable[Event], direct: frozenset[Axis] = frozenset()
) -> Schedule:
    """The step list that runs ``order``, which must start everything after what it depends on.

    What depends on nothing but a ring keeps its place along a ``direct`` axis too.

    Waits are lazy: at the first step where a block, a merge or an onward send needs the arrival, or where a
    slot is used again; so a wait never holds up anything that started earlier in the order.
    """
    cutter = _Cutter(direction, tile, direct)
    for event in order:
        getattr(cutter, event.kind)(event)
    return cutter.finish()
