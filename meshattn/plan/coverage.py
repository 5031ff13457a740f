"""What a plan takes from outside of the table of kernel times, and how to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .cost import CallShape
from .kernel_times import MOST_WORK
from .planner import Question
from .prediction import Prediction

SAID = 3
"""So many things are named, of others their number."""


@dataclass(frozen=True)
class Coverage:
    """``lacking`` is what the table of kernel times does not have, in words; ``command`` measures a table
    that has everything, but for ``beyond``: blocks that are too large to be timed."""

    lacking: tuple[str, ...]
    command: str
    beyond: int = 0

    def text(self, kernels: str) -> str:
        """For people; empty if nothing is lacking. ``kernels`` says where the table comes from."""
        if not self.lacking:
            return ""
        more = f", and {len(self.lacking) - SAID} more" if len(self.lacking) > SAID else ""
        text = f"Extrapolated from the kernel times ({kernels}): {', '.join(self.lacking[:SAID])}{more}."
        if not self.command:
            return f"{text} To measure blocks of these sizes would take long."
        but = f" but {self.beyond}, which would take long" if self.beyond else ""
        return (
            f"{text} To measure all blocks of the cuts above{but}, on ranks of this cluster:\n{self.command}"
        )


def coverage(question: Question, found: Sequence[Prediction], dtype: str) -> Coverage:
    """Of the blocks of some candidates for inputs of type ``dtype`` (a name of `ITEMSIZES`)."""
    table = question.topology.kernels
    lacking: dict[str, None] = {}
    if table.dtype != dtype:
        named = "a type that their file does not say" if table.dtype is None else table.dtype
        lacking[f"{dtype} (the table has {named})"] = None
    blocks = dict.fromkeys(question.inner(each.cut, each.order) for each in found)
    if not lacking:
        lacking = dict.fromkeys(text for inner in blocks for text in _lacks(question, inner))
    if not lacking:
        return Coverage((), "")
    # A file stands for itself: it has to have all blocks. Some lists compute a block in two parts.
    blocks |= dict.fromkeys(replace(inner, rows=-(-inner.rows // 2)) for inner in blocks if inner.rows > 1)
    sizes = sorted({(s.rows, s.batch * s.heads, s.batch * s.kv_heads) for s in blocks})
    timed = [(rows, heads, kv_heads) for rows, heads, kv_heads in sizes if heads * rows**2 <= MOST_WORK]
    options = [
        f"--dtype {dtype}",
        f"--head-dim {max(question.shape.head_dim, question.shape.head_dim_v)}",
        *(f"--block {rows} {heads} {kv_heads}" for rows, heads, kv_heads in timed),
    ]
    ranks = min(question.ranks, question.topology.gpus_per_node)
    start = f"torchrun --nproc-per-node {ranks} -m meshattn calibrate --out measured.json"
    command = "    " + " ".join([start, *options]) if timed else ""
    return Coverage(tuple(lacking), command, len(sizes) - len(timed))


def _lacks(question: Question, inner: CallShape) -> tuple[str, ...]:
    return question.topology.kernels.lacks(
        heads=inner.batch * inner.heads,
        kv_heads=inner.batch * inner.kv_heads,
        rows=inner.rows,
        keys=inner.chunk_keys,
        head_dim=max(inner.head_dim, inner.head_dim_v),
        causal=inner.causal,
    )
