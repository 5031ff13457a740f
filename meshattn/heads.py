"""The head axis: an all-to-all before and after the engine, group of heads by group (Ulysses).

Outside, a rank holds its rows of all heads; inside, the engine of a tile computes with the rows of all ranks
of the head axis, of a part of the heads. The exchange of one group of heads runs while another is computed.
With a head axis of one rank nothing is exchanged, and the engine gets the tensors as they are.

Letters: B batch, w ranks of the head axis, L and L_kv rows of a rank, C = w * L; H and H_kv heads outside, of
which a rank computes H / w and K (`meshattn.plan.heads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from meshattn import engine
from meshattn.packing import Field, Packing, Views
from meshattn.plan.heads import HeadSplit
from meshattn.plan.schedule import Direction, Way
from meshattn.program import Call
from meshattn.sinks import sinks_gradient
from meshattn.transport.base import Exchange, Handle, Message, Transport

QUERY, KEYS = ("q", "out", "lse", "do", "delta", "dq"), ("k", "v", "dk", "dv")
WORD = torch.int64
BY_ROW = ("lse", "delta")  # [B, H, L]; all others are [B, L, H, D]


@dataclass(frozen=True)
class HeadCall:
    """One attention call on one rank of the head axis; no tensors."""

    inner: Call  # of the first group
    split: HeadSplit
    groups: int
    members: tuple[int, ...]  # mesh ranks of the head axis, in order
    place: int  # of this rank among them
    transport: Transport

    @property
    def rows(self) -> int:
        """L."""
        return self.inner.rows // self.split.ranks

    @property
    def key_rows(self) -> int:
        """L_kv."""
        return self.inner.key_rows // self.split.ranks

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """The call of each group: dropout asks which heads they are."""
        if self.inner.dropout is None:
            return (self.inner,) * self.groups
        firsts = [self.heads_of("q", self.place, group).start for group in range(self.groups)]
        rules = [replace(self.inner.dropout, first_head=first) for first in firsts]
        return tuple(replace(self.inner, dropout=rule) for rule in rules)

    def heads_of(self, name: str, place: int, group: int) -> range:
        """The heads that a place computes in a group; of key/value heads, their copies counted each."""
        size = self.inner.heads if name in QUERY else self.inner.kv_heads
        first = (place * self.groups + group) * size
        return range(first, first + size)

    @cached_property
    def messages(self) -> Mapping[tuple[Direction, Way], Packing]:
        """What is exchanged."""
        return {
            ("forward", "inward"): self._fields("q", "k", "v"),
            ("forward", "outward"): self._fields("out", "lse"),
            ("backward", "inward"): self._fields("do", "delta"),
            ("backward", "outward"): self._fields("dq", "dk", "dv"),
        }

    def _fields(self, *names: str) -> Packing:
        """L rows of these tensors, with the heads of a group; matrices in words, see ``_words``."""
        inner = self.inner
        of_keys = {"q": inner.head_dim, "k": inner.head_dim, "dq": inner.head_dim, "dk": inner.head_dim}

        def field(name: str) -> Field:
            if name in BY_ROW:
                return Field(name, (inner.batch, inner.heads, self.rows), inner.accumulator_dtype)
            rows, heads = self.rows, inner.heads
            if name in KEYS:
                rows, heads = self.key_rows, inner.kv_heads
            size = of_keys.get(name, inner.head_dim_v) * self.dtype_of(name).itemsize
            return Field(name, (inner.batch, rows, heads, size // WORD.itemsize), WORD)

        return Packing(tuple(map(field, names)))

    def dtype_of(self, name: str) -> torch.dtype:
        """Type of a matrix."""
        return self.inner.dkv_dtype if name in ("dk", "dv") else self.inner.dtype


def forward(
    call: HeadCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention of this rank's rows.

    Args:
        q: [B, L, H, D].
        k: [B, L_kv, H_kv, D].
        v: [B, L_kv, H_kv, D_v].
        sinks: [H], see `meshattn.sinks`.
        seed: of dropout, if the call has any.

    Returns:
        out [B, L, H, D_v] in the type of q, lse [B, H, L] in the accumulator type, and what `backward` needs
        of this call.
    """
    if call.split.ranks == 1:
        out, lse = engine.forward(call.inner, q, k, v, sinks, seed)
        return out, lse, [q, k, v]
    outside = {"q": q, "k": k, "v": v}
    inner, kept = call.inner, list[Tensor]()
    all_heads = call.split.ranks * call.split.heads

    def new_results() -> Views:
        return {
            "out": q.new_empty((inner.batch, call.rows, all_heads, inner.head_dim_v)),
            "lse": q.new_empty((inner.batch, all_heads, call.rows), dtype=inner.accumulator_dtype),
        }

    def compute(group: int, inside: Views) -> Views:
        q, k, v = inside["q"], inside["k"], inside["v"]
        mine = call.heads_of("q", call.place, group)
        some = None if sinks is None else sinks[mine.start : mine.stop]
        out, lse = engine.forward(call.calls[group], q, k, v, some, seed)
        kept.extend((q, k, v, lse))
        return {"out": out, "lse": lse}

    results = _run(call, "forward", outside, compute, new_results)
    return results["out"], results["lse"], kept


def backward(
    call: HeadCall,
    kept: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    sinks: Tensor | None,
    seed: int,
) -> tuple[Tensor | None, ...]:
    """Gradients of this rank's q, k, v and sinks; arguments as given to and returned by `forward`, do like
    out, dlse like lse if a gradient comes in through it.

    That of the sinks is what the rows of this rank give.
    """
    if call.split.ranks == 1 and sinks is None and dlse is None:
        q, k, v = kept
        return *engine.backward(call.inner, q, k, v, lse, do, seed=seed, out=out), None
    delta = engine.row_terms(out, lse, do, dlse)
    dsinks = None if sinks is None else sinks_gradient(sinks, lse, delta)
    if call.split.ranks == 1:
        q, k, v = kept
        return *engine.backward(call.inner, q, k, v, lse, do, delta, seed), dsinks
    inner, split = call.inner, call.split
    every = [kept[first : first + 4] for first in range(0, len(kept), 4)]
    copies = split.ranks * split.kv_heads
    shapes = {"dq": (call.rows, split.ranks * split.heads, inner.head_dim)}
    shapes |= {"dk": (call.key_rows, copies, inner.head_dim), "dv": (call.key_rows, copies, inner.head_dim_v)}

    def new_results() -> Views:
        return {
            name: do.new_empty((inner.batch, *shape), dtype=call.dtype_of(name))
            for name, shape in shapes.items()
        }

    def compute(group: int, inside: Views) -> Views:
        q, k, v, lse = every[group]
        grads = engine.backward(call.calls[group], q, k, v, lse, inside["do"], inside["delta"], seed)
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    results = _run(call, "backward", {"do": do, "delta": delta}, compute, new_results)
    dk, dv = (_sum_of_copies(call, results[name]) for name in ("dk", "dv"))
    return results["dq"], dk, dv, dsinks


def _sum_of_copies(call: HeadCall, gradient: Tensor) -> Tensor:
    """[B, L_kv, H_kv, D] from that of every copy, which lie side by side, in their order."""
    if call.split.copies == 1:
        return gradient
    batch, rows, heads, size = gradient.shape
    copies = gradient.view(batch, rows, heads // call.split.copies, call.split.copies, size)
    total = copies[:, :, :, 0].to(call.inner.accumulator_dtype)
    for copy in range(1, call.split.copies):
        total = total + copies[:, :, :, copy]
    return total.to(call.inner.dtype)


def _run(
    call: HeadCall,
    direction: Direction,
    outside: Views,
    compute: Callable[[int, Views], Views],
    new_results: Callable[[], Views],
) -> Views:
    """The results of all groups of heads, one after the other: in, computed, out.

    While a group is computed, the next one comes in and the one before goes out. The results are made when
    the first of them come in: before, the kernel has taken memory of its own and given it back.
    """
    inward, outward = _AllToAll(call, direction, "inward"), _AllToAll(call, direction, "outward")
    places, given = range(call.split.ranks), _words(outside)
    results: dict[str, Tensor] = {}
    wanted: dict[str, Tensor] = {}

    def give(group: int) -> None:
        inward.start(group, [_some_heads(call, given, place, group) for place in places])

    def take(group: int) -> None:
        if not results:
            results.update(new_results())
            wanted.update(_words(results))
        for place, part in enumerate(outward.finish()):
            for name, tensor in part.items():
                heads = call.heads_of(name, place, group)
                at = 1 if name in BY_ROW else 2
                wanted[name].narrow(at, heads.start, len(heads)).copy_(tensor)
        outward.release()

    give(0)
    for group in range(call.groups):
        parts = inward.finish()
        joined = {name: torch.cat([part[name] for part in parts], _row_dim(name)) for name in outside}
        inward.release()
        if group + 1 < call.groups:
            give(group + 1)
        if call.groups > 1:
            call.transport.compute_follows()
        computed = _words(compute(group, {name: x.view(outside[name].dtype) for name, x in joined.items()}))
        if group > 0:
            take(group - 1)
        outward.start(group, [_some_rows(call, computed, place) for place in places])
    take(call.groups - 1)
    return results


def _words(tensors: Views) -> Views:
    """[.., D] in words of 8 bytes, the same memory unless it is no array of them: exchanges copy tensors
    that lie scattered, which takes longer the more elements they have. Head sizes are multiples of 8."""

    def words(tensor: Tensor) -> Tensor:
        tensor, size = tensor.detach(), WORD.itemsize // tensor.element_size()
        places = tensor.storage_offset(), *tensor.stride()[:-1]
        if tensor.stride(-1) != 1 or any(place % size for place in places):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor.view(WORD)

    return {name: tensor if name in BY_ROW else words(tensor) for name, tensor in tensors.items()}


def _row_dim(name: str) -> int:
    return 2 if name in BY_ROW else 1


def _some_heads(call: HeadCall, tensors: Views, place: int, group: int) -> Views:
    """What one place computes of this rank's rows."""

    def cut(name: str, tensor: Tensor) -> Tensor:
        at = 1 if name in BY_ROW else 2
        heads = call.heads_of(name, place, group)
        if name in QUERY or call.split.copies == 1:
            return tensor.narrow(at, heads.start, len(heads))
        return torch.cat([tensor.narrow(at, head // call.split.copies, 1) for head in heads], at)

    return {name: cut(name, tensor) for name, tensor in tensors.items()}


def _some_rows(call: HeadCall, tensors: Views, place: int) -> Views:
    """What this rank computed of one place's rows."""
    return {
        name: tensor.narrow(_row_dim(name), place * rows, rows)
        for name, tensor in tensors.items()
        for rows in (call.key_rows if name in KEYS else call.rows,)
    }


def _in_rows(part: Views) -> tuple[Tensor, ...]:
    """What is sent: a copy, unless it lies in one piece."""
    return tuple(tensor.contiguous() for tensor in part.values())


class _AllToAll:
    """Exchanges of all pairs of the head axis one way, of one group at a time."""

    def __init__(self, call: HeadCall, direction: Direction, way: Way) -> None:
        self._call = call
        self._direction: Direction = direction
        self._way: Way = way
        self._packing = call.messages[direction, way]
        others, device = call.split.ranks - 1, call.inner.device
        self._received = call.transport.received("heads", way, self._packing, others, device)[:others]
        self._own: Views = {}
        self._handle: Handle | None = None

    def start(self, group: int, parts: Sequence[Views]) -> None:
        """Send to every place its part, and get the parts of all for this one."""
        self._own = parts[self._call.place]
        self._handle = self._call.transport.start_together(list(self._exchanges(group, parts)))

    def _exchanges(self, group: int, parts: Sequence[Views]) -> Iterator[Exchange]:
        call = self._call
        where = f"{self._direction} head group {group + 1}/{call.groups}"
        names = " ".join(field.name for field in self._packing.fields)
        for distance, received in enumerate(self._received, 1):
            to, source = self._at(distance), self._at(-distance)
            message = Message(
                phase=self._direction,
                axis="heads",
                flow=self._way,
                label=f"{where}, {names}",
                to=call.members[to],
                source=call.members[source],
                slot=distance - 1,
            )
            yield message, _in_rows(parts[to]), tuple(received.views.values())

    def _at(self, distance: int) -> int:
        return (self._call.place + distance) % self._call.split.ranks

    def finish(self) -> list[Views]:
        """The part of every place, in their order; to be read before ``release``."""
        assert self._handle is not None
        self._handle.wait()
        parts = {self._call.place: self._own}
        parts |= {self._at(-distance): received.views for distance, received in enumerate(self._received, 1)}
        return [parts[place] for place in range(self._call.split.ranks)]

    def release(self) -> None:
        """The received parts are not needed any more."""
        assert self._handle is not None
        self._handle.release()
        self._handle, self._own = None, {}
