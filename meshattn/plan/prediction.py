"""What the planner says of a candidate, and in one sentence why one is better than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .links import LinkUse
from .placement import Cut, MeshAxis, Placement


@dataclass(frozen=True)
class Prediction:
    """One candidate, all wanted passes together; microseconds and bytes."""

    cut: Cut
    order: tuple[MeshAxis, ...]
    where: str
    links: LinkUse
    memory: int
    """Buffers of a rank beside arguments and results, and what the kernel keeps for itself, at the peak."""
    workspace: int
    """The kernel's part of it."""
    bound_us: float
    queued_us: float
    """What the host takes to queue it all."""
    kernels_us: float
    """What the blocks of a rank take, alone."""
    total_us: float
    compute_us: float
    """Blocks, merges, copies, and what exchanges take from them."""
    exposed_us: float
    exchanges: int
    """Messages that a rank sends."""

    @property
    def other_us(self) -> float:
        """Merges, copies, casts, and what exchanges take from the kernels: with ``kernels_us`` and
        ``exposed_us`` this is the total."""
        return self.total_us - self.kernels_us - self.exposed_us

    @property
    def is_ring(self) -> bool:
        return self.cut.heads == 1 and self.cut.tile.a == 1

    @property
    def is_ulysses(self) -> bool:
        return self.cut.heads > 1 and self.cut.tile.ranks == 1

    @property
    def name(self) -> str:
        """heads x a x b, and what it is known as."""
        known = ""
        if self.is_ring:
            known = " (ring)"
        elif self.is_ulysses:
            known = " (Ulysses)"
        elif self.cut.heads > 1 and self.cut.tile.a == 1:
            known = " (USP)"
        return f"{self.cut}{known}"

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks, numbered node by node, in the order that a mesh must be given."""
        return Placement(self.cut, self.order, 1).group

    @property
    def limit(self) -> str:
        """What the bound comes from, or that the time is far from all of them."""
        uses = {
            "compute": self.kernels_us,
            "ports inside the node": self.links.port_us,
            "network cards": self.links.card_us,
            "host": self.queued_us,
        }
        name = max(uses, key=lambda use: uses[use])
        return name if self.total_us < 1.5 * uses[name] else f"waits (then {name})"

    def as_json(self) -> dict[str, object]:
        """In types that JSON knows."""
        links = {name: getattr(self.links, name) for name in ("rank", "port", "card", "node", "leaving")}
        return {
            "heads": self.cut.heads,
            "tile": str(self.cut.tile),
            "name": self.name,
            "order": list(self.order),
            "where": self.where,
            "sent_bytes": links,
            "exchanges": self.exchanges,
            "peak_bytes": self.memory,
            "kernel_bytes": self.workspace,
            "kernels_us": self.kernels_us,
            "compute_us": self.compute_us,
            "other_us": self.other_us,
            "exposed_us": self.exposed_us,
            "total_us": self.total_us,
            "limit": self.limit,
            "group": list(self.group),
        }


def why(found: Sequence[Prediction]) -> str:
    """One sentence: why the first wins over the next cut, and over plain ring."""
    best, *others = found
    share = 100 * best.kernels_us / best.total_us
    if best.is_ring:
        start = "plain ring is best here"
    elif best.is_ulysses:
        start = "Ulysses is best here"
    else:
        start = f"{best.cut} is best"
    text = f"{start}: kernels alone take {share:.0f} % of its {best.total_us / 1e3:.1f} ms"
    rivals = [each for each in others if each.cut != best.cut]
    if not rivals:
        return text + ", and there is no other cut to choose from"
    named = dict.fromkeys([rivals[0], *(each for each in rivals if each.is_ring)])
    return "; ".join([text, *(_against(best, each) for each in named)])


def _against(best: Prediction, other: Prediction) -> str:
    """How much longer another candidate takes, and on what it spends most of that."""
    lost = {
        f"its kernels take {_both(other.kernels_us, best.kernels_us)} ms": other.kernels_us - best.kernels_us,
        f"it waits {_both(other.exposed_us, best.exposed_us)} ms": other.exposed_us - best.exposed_us,
        "it merges and copies more": (other.compute_us - other.kernels_us)
        - (best.compute_us - best.kernels_us),
    }
    reason = max(lost, key=lambda text: lost[text])
    if reason.startswith("it waits"):
        reason += _sent(best, other)
    times = other.total_us / best.total_us
    return f"{other.name} takes {times:.{2 if times > 1.02 else 3}f} times as long, as {reason}"


def _both(other: float, best: float) -> str:
    """In milliseconds, with as many digits as tell them apart."""
    for digits in range(1, 4):
        told = [f"{us / 1e3:.{digits}f}" for us in (other, best)]
        if told[0] != told[1]:
            break
    return " instead of ".join(told)


def _sent(best: Prediction, other: Prediction) -> str:
    """What it waits for, if that is more than the best has: the host, or what it sends."""
    use, least = other.links, best.links
    if other.queued_us > max(use.card_us, use.port_us, best.queued_us):
        return " for the host to queue its blocks and exchanges"
    if use.card > least.card:
        return (
            f" for what its busiest network card sends, {size_of(use.card)} instead of {size_of(least.card)}"
        )
    if use.rank > least.rank and size_of(use.rank) != size_of(least.rank):
        return f" for what its ranks send, {size_of(use.rank)} each instead of {size_of(least.rank)}"
    return ""


def size_of(num_bytes: int) -> str:
    """In words."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
