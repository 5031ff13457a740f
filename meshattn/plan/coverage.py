"""What a plan takes from outside of the table of kernel times, and how to measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cost import CallShape
from .planner import Question
from .prediction import Prediction

SAID = 3
"""So many things are named, of others their number."""


@dataclass(frozen=True)
class Coverage:
    """``lacking`` is what the table of kernel times does not have, in words; ``command`` measures it."""

    lacking: tuple[str, ...]
    command: str

    def text(self, kernels: str) -> str:
        """For people; empty if nothing is lacking. ``kernels`` says where the table comes from."""
        if not self.lacking:
            return ""
        more = f", and {len(self.lacking) - SAID} more" if len(self.lacking) > SAID else ""
        return (
            f"Extrapolated from the kernel times ({kernels}): {', '.join(self.lacking[:SAID])}{more}. To "
            f"measure them, on ranks of this cluster:\n{self.command}"
        )


def coverage(question: Question, found: Sequence[Prediction], dtype: str) -> Coverage:
    """Of the blocks of some candidates for inputs of type ``dtype`` (a name of `ITEMSIZES`)."""
    table = question.topology.kernels
    lacking: dict[str, None] = {}
    if table.dtype != dtype:
        named = "a type that their file does not say" if table.dtype is None else table.dtype
        lacking[f"{dtype} (the table has {named})"] = None
    blocks: dict[CallShape, None] = dict.fromkeys(question.inner(each.cut, each.order) for each in found)
    if not lacking:
        blocks = {inner: None for inner in blocks if _lacks(question, inner)}
    for inner in blocks:
        lacking |= dict.fromkeys(_lacks(question, inner))
    if not lacking:
        return Coverage((), "")
    heads = sorted(
        {(shape.batch * shape.heads, shape.batch * shape.kv_heads) for shape in blocks}, reverse=True
    )
    sizes = sorted({shape.rows for shape in blocks})
    options: dict[str, Sequence[object]] = {
        "--dtype": [dtype],
        "--head-dim": [max(question.shape.head_dim, question.shape.head_dim_v)],
        "--heads": [number for number, _ in heads],
        "--kv-heads": [number for _, number in heads],
        "--rows": sizes,
    }
    words = " ".join(f"{name} {' '.join(map(str, values))}" for name, values in options.items())
    ranks = min(question.ranks, question.topology.gpus_per_node)
    start = f"torchrun --nproc-per-node {ranks} -m meshattn calibrate --out measured.json"
    return Coverage(tuple(lacking), f"    {start} {words}")


def _lacks(question: Question, inner: CallShape) -> tuple[str, ...]:
    return question.topology.kernels.lacks(
        heads=inner.batch * inner.heads,
        kv_heads=inner.batch * inner.kv_heads,
        rows=inner.rows,
        keys=inner.chunk_keys,
        head_dim=max(inner.head_dim, inner.head_dim_v),
        causal=inner.causal,
    )
