"""Which cut is best on a cluster, and why: every candidate is emulated, or shown to be slower by a bound.

A candidate is heads x a x b and the order of its axes over nodes. No step list is faster than its kernels,
than the bytes of the busiest port or card, than the latencies of exchanges in a row, or than the host that
queues it all; candidates are emulated by that bound, the least first, until the best time is below the bound
of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .assignment import Assignment, Tile, tiles
from .block_cost import Mask, block_times, partial_us
from .cost import CallShape, Pace, choose_tile, total_bytes, traffic
from .heads import buffer_memory, exchange, inner_shape
from .hops import Visibility
from .kernel_times import BlockPass
from .links import LinkUse, link_use, used_links
from .pace import num_groups, pace_of
from .passes import pass_script
from .placement import ORDER, Cut, MeshAxis, Placement
from .prediction import Prediction
from .schedule import Direction
from .timeline import run
from .topology import Topology

BOTH: tuple[Direction, ...] = ("forward", "backward")
WAYS: dict[Direction, tuple[BlockPass, BlockPass]] = {
    "forward": ("forward", "merging"),
    "backward": ("backward", "adding"),
}
"""To compute a block of a pass."""


@dataclass(frozen=True)
class Question:
    """What is to be planned: a call of ``shape`` as outside (``rows`` of a rank, all heads) on ``ranks``."""

    ranks: int
    shape: CallShape
    topology: Topology
    passes: tuple[Direction, ...] = BOTH
    mask: Callable[[int], Mask] | None = None
    """By the ranks of the head axis; None is causal striping or a full mask, as ``shape`` says."""

    def placement(self, cut: Cut, order: tuple[MeshAxis, ...]) -> Placement:
        return Placement(cut, order, self.topology.gpus_per_node, self.topology.gpus_per_nic)

    def links(self, cut: Cut, order: tuple[MeshAxis, ...]) -> LinkUse:
        """Of all passes."""
        placement = self.placement(cut, order)
        first, *others = (
            link_use(direction, self.shape, placement, self.topology) for direction in self.passes
        )
        return sum(others, first)

    def inner(self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> CallShape:
        """What a rank computes at a time: all rows of its head axis, the heads of one group."""
        if cut.heads == 1:
            return self.shape
        return inner_shape(self.shape, cut.heads, num_groups(self.shape, cut, self.topology, order))

    def kernels_us(self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> float:
        """Least time of the blocks of a rank."""
        groups = num_groups(self.shape, cut, self.topology, order)
        inner = self.inner(cut, order)
        times = block_times(self.topology.kernels, inner)
        total = 0.0
        for direction in self.passes:
            both = [times[what] for what in WAYS[direction]]
            if self.mask is not None:
                total += _busiest(self.mask(cut.heads), cut.tile, tuple(both))
            else:
                total += cut.tile.ranks * min(half if inner.causal else whole for half, whole in both)
        return total * groups

    def bound_us(self, cut: Cut, order: tuple[MeshAxis, ...]) -> float:
        """No list is faster."""
        least = max(self.kernels_us(cut, order), self.queued_us(cut, order))
        if self.mask is not None:  # hops that it leaves out are not counted here
            return least
        links = self.links(cut, order)
        return max(least, links.port_us, links.card_us, self._latencies_us(cut, order))

    def queued_us(self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> float:
        """What the host takes to queue the blocks, merges, copies and exchanges of a rank."""
        queued = len(self.passes) * (cut.tile.ranks + 2)  # what comes before the blocks, and behind them
        if cut.heads > 1:
            queued += len(self.passes) * 2 * (cut.heads - 1 + 2)  # packed, sent and joined, both ways
        for direction in self.passes:
            for (_, way), part in traffic(direction, cut.tile, self.shape).items():
                queued += part.num_messages * (2 if way == "outward" else 1)  # partials are merged
        return self.topology.start_us * num_groups(self.shape, cut, self.topology, order) * queued

    def _latencies_us(self, cut: Cut, order: tuple[MeshAxis, ...]) -> float:
        """Of what is exchanged one behind the other: along all axes inside a node, or along one of the others
        by a rank whose neighbour sits in another node."""
        groups = num_groups(self.shape, cut, self.topology, order)
        moved = Counter[MeshAxis]({"heads": 2 * len(self.passes)} if cut.heads > 1 else {})
        for direction in self.passes:
            for (axis, _), part in traffic(direction, cut.tile, self.shape).items():
                moved[axis] += part.num_messages
        near = self.placement(cut, order).inside_axes
        inside = sum(count for axis, count in moved.items() if axis in near)
        across = max((count for axis, count in moved.items() if axis not in near), default=0)
        latencies = [inside * self.topology.inside.latency_us]
        latencies += [across * self.topology.across.latency_us] if across else []
        return groups * max(latencies)

    def memory(self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> int:
        """Buffers of a rank, and what the kernel keeps for itself, in the pass that needs more."""
        groups = num_groups(self.shape, cut, self.topology, order)
        return max(
            buffer_memory(each, cut.tile, self.shape, cut.heads, groups)
            + (self.workspace(cut, order) if each == "backward" else 0)
            for each in self.passes
        )

    def workspace(self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER) -> int:
        """What the kernel keeps for itself while it computes the backward of a block."""
        inner = self.inner(cut, order)
        return self.topology.kernels.workspace(
            heads=inner.batch * inner.heads,
            kv_heads=inner.batch * inner.kv_heads,
            keys=inner.chunk_keys,
            head_dim=max(inner.head_dim, inner.head_dim_v),
            causal=inner.causal,
        )

    def predict(
        self, cut: Cut, order: tuple[MeshAxis, ...] = ORDER, *, pace: Pace | None = None
    ) -> Prediction:
        """Emulate a candidate, with lists made for this ``pace``; by default for the cluster."""
        return _predict(self, cut, order, pace or pace_of(self.topology, cut, order))


@lru_cache(maxsize=1024)
def _busiest(mask: Mask, tile: Tile, times: tuple[tuple[float, float], ...]) -> float:
    """What a mask leaves to the busiest rank, at least: each block takes the less of these times, which are
    those of half of its pairs and of all."""
    assignment = Assignment(tile)
    parts = {part for row in mask.parts for part in row}
    least = {part: min(partial_us(part, half, whole) for half, whole in times) for part in parts}
    worth = [[least[part] for part in row] for row in mask.parts]

    def of_rank(chunk: int) -> float:
        keys = assignment.keys(chunk)
        return sum(worth[p][q] for p in assignment.queries(chunk) for q in keys)

    return max(map(of_rank, range(tile.ranks)))


@lru_cache(maxsize=1024)
def _predict(question: Question, cut: Cut, order: tuple[MeshAxis, ...], pace: Pace) -> Prediction:
    """Kept, since what a plan shows and what "auto" takes are mostly the same candidates."""
    total = compute = exposed = 0.0
    exchanges = 0
    links: list[LinkUse] = []
    mask = None if question.mask is None else question.mask(cut.heads)
    for direction in question.passes:
        script = pass_script(
            direction, question.shape, cut, question.topology, order=order, mask=mask, pace=pace
        )
        if mask is not None:
            links.append(used_links(script, question.topology))
        timeline = run(script, question.topology)
        total += timeline.total_us
        compute += max(timeline.compute_us)
        exposed += timeline.exposed_us
        exchanges += script.num_exchanges
    return Prediction(
        cut=cut,
        order=order,
        where=question.placement(cut, order).describe(),
        links=question.links(cut, order) if mask is None else sum(links[1:], links[0]),
        memory=question.memory(cut, order),
        workspace=question.workspace(cut, order) if "backward" in question.passes else 0,
        bound_us=question.bound_us(cut, order),
        queued_us=question.queued_us(cut, order),
        kernels_us=question.kernels_us(cut, order),
        total_us=total,
        compute_us=compute,
        exposed_us=exposed,
        exchanges=exchanges,
    )


def cuts(ranks: int, shape: CallShape, heads: int | None = None, tile: Tile | None = None) -> Iterator[Cut]:
    """All cuts of these ranks, or those with this head axis or this tile."""
    for w in range(1, ranks + 1) if heads is None else (heads,):
        if w < 1 or ranks % w or shape.heads % w:
            continue
        for each in tiles(ranks // w):
            if tile is None or each == tile:
                yield Cut(w, each)


def rank_candidates(
    question: Question,
    candidates: Sequence[tuple[Cut, tuple[MeshAxis, ...]]],
    *,
    at_least: int = 1,
    at_most: int | None = None,
    placements: bool = False,
    say: Callable[[str], None] | None = None,
) -> list[Prediction]:
    """The best first: the ``at_least`` best cuts, each once, where it is best placed, or with ``placements``
    the best pairs of both; and those that were emulated on the way.
    ``at_most`` so many are emulated, those with the least bounds. ``say`` is told before each how many were.

    Equal times are in order of bytes, of those that leave nodes, then of buffers.
    """
    bounds = sorted(
        (question.bound_us(cut, order), question.memory(cut, order), number)
        for number, (cut, order) in enumerate(candidates)
    )
    best: dict[object, Prediction] = {}
    for done, (bound, _, number) in enumerate(bounds[:at_most]):
        if say is not None:
            say(f"{done} of at most {len(bounds[:at_most])} candidates are emulated")
        found = sorted(best.values(), key=_preference)
        if len(found) >= at_least and bound > found[at_least - 1].total_us:
            break
        each = question.predict(*candidates[number])
        name = (each.cut, each.order) if placements else each.cut
        if name not in best or _preference(each) < _preference(best[name]):
            best[name] = each
    return sorted(best.values(), key=_preference)


def _preference(each: Prediction) -> tuple[object, ...]:
    links = each.links
    return each.total_us, links.rank, links.leaving, each.memory, each.cut, each.order


def plan(
    question: Question,
    *,
    heads: int | None = None,
    memory_limit: int | None = None,
    at_least: int = 10,
    placements: bool = False,
    say: Callable[[str], None] | None = None,
) -> list[Prediction]:
    """The cuts, best first, each where it is best placed, or with ``placements`` everywhere; plain ring and
    Ulysses, where they can be, always among them. ``say`` as in `rank_candidates`.

    Raises ValueError if no cut keeps within ``memory_limit`` bytes of buffers.
    """
    every = [
        (cut, order)
        for cut in cuts(question.ranks, question.shape, heads)
        for order in cut.orders(question.topology.gpus_per_node)
    ]
    if not every:
        numbers = sorted({cut.heads for cut in cuts(question.ranks, question.shape)})
        raise ValueError(
            f"{heads} ranks of the head axis must divide the {question.ranks} ranks and the "
            f"{question.shape.heads} heads: give one of {', '.join(map(str, numbers))}"
        )
    every = _within(question, every, memory_limit)
    found = rank_candidates(question, every, at_least=at_least, placements=placements, say=say)
    for wanted in (Cut(1, Tile(1, question.ranks)), Cut(question.ranks, Tile(1, 1))):
        same = [each for each in every if each[0] == wanted]
        if same and all(each.cut != wanted for each in found):
            found += rank_candidates(question, same)[:1]
    return sorted(found, key=_preference)


def _within(
    question: Question, every: list[tuple[Cut, tuple[MeshAxis, ...]]], limit: int | None
) -> list[tuple[Cut, tuple[MeshAxis, ...]]]:
    fitting = [each for each in every if limit is None or question.memory(*each) <= limit]
    if not fitting:
        least, order = min(every, key=lambda each: question.memory(*each))
        raise ValueError(
            f"the memory limit is {limit} bytes, but the buffers of a rank and its kernel take at least "
            f"{question.memory(least, order)} bytes (heads x a x b = {least}): raise the limit or use more "
            "ranks"
        )
    return fitting


@lru_cache(maxsize=256)
def choose(
    ranks: int,
    shape: CallShape,
    *,
    heads: int | None = 1,
    tile: Tile | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
    visibility: Visibility | None = None,
) -> Cut:
    """The cut of a mesh: what ``tile="auto"`` (``tile`` None) and ``heads="auto"`` (``heads`` None) take.

    ``shape`` is that of the call outside: ``rows`` of a rank, all heads. With a topology the least predicted
    time of both passes, the axes in the library's own order; without one, or where masks leave blocks out
    (``visibility``), the fewest bytes. Depends on its arguments alone.

    Raises ValueError if nothing fits.
    """
    candidates = list(cuts(ranks, shape, heads, tile))
    if not candidates:
        if tile is not None and ranks % tile.ranks:
            raise ValueError(f"tile {tile} takes {tile.ranks} ranks, which do not divide the {ranks}")
        wanted = "" if tile is None else f" beside tile {tile}"
        raise ValueError(
            f"{ranks} ranks cannot be cut into heads={'auto' if heads is None else heads}{wanted}: the ranks "
            f"of the head axis must divide them and the {shape.heads} heads"
        )
    every_block = visibility is None or visibility == Visibility.full(len(visibility.keys))
    if topology is not None and every_block:
        question = Question(ranks, shape, topology)
        placed = _within(question, [(cut, ORDER) for cut in candidates], memory_limit)
        return rank_candidates(question, placed)[0].cut
    by_heads: dict[int, list[Cut]] = {}
    for cut in candidates:
        by_heads.setdefault(cut.heads, []).append(cut)
    best: list[tuple[int, int, Cut]] = []
    for w, some in by_heads.items():
        inner = inner_shape(shape, w) if w > 1 else shape
        if tile is None:
            seen = visibility if visibility is not None and len(visibility.keys) * w == ranks else None
            try:
                some = [Cut(w, choose_tile(ranks // w, inner, memory_limit=memory_limit, visibility=seen))]
            except ValueError:
                if len(by_heads) == 1:
                    raise
                continue
        moved = sum(total_bytes(direction, some[0].tile, inner) for direction in BOTH)
        if w > 1:
            moved += sum(
                part.num_bytes for direction in BOTH for part in exchange(direction, shape, w).values()
            )
        best.append((moved, w, some[0]))
    if not best:
        raise ValueError(f"no cut of {ranks} ranks keeps its buffers within {memory_limit} bytes")
    return min(best)[2]
