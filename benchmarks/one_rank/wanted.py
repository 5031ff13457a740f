"""What the kernels must reach, as ratios between figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from one_rank.attention_cases import (
    ADDING,
    BACKWARD,
    BACKWARD_TOTAL,
    FORWARD,
    FORWARD_TOTAL,
    HIDDEN,
    MERGING,
    TOKENS,
    Case,
)


@dataclass(frozen=True)
class Requirement:
    """The ratio of one figure to another, named ``kernel: pass``, in every case that counts."""

    measure: str
    wanted: float
    ours: str
    peer: str
    counts: Callable[[Case], bool]


def requirements() -> Iterator[Requirement]:
    """All of them, in the order of the report."""
    for head_dim, least in ((128, 1.0), (64, 0.95)):
        yield Requirement(
            f"forward / FA4 forward, D{head_dim}, 16k",
            least,
            f"hopper: {FORWARD_TOTAL}",
            f"fa4: {FORWARD_TOTAL}",
            _batch_of(head_dim, 16384),
        )
    for peer, least_128, least_64, note in (
        ("fa4-deterministic", 1.0, 0.97, "FA4 deterministic"),
        ("fa4", 1.0, 1.0, "FA4 unordered (aim)"),
        ("hopper-unordered", 0.97, 0.97, "own unordered"),
    ):
        for head_dim, least in ((128, least_128), (64, least_64)):
            for rows in (16384, 4096):
                yield Requirement(
                    f"deterministic backward total / {note}, D{head_dim}, {rows // 1024}k",
                    least,
                    f"hopper: {BACKWARD_TOTAL}",
                    f"{peer}: {BACKWARD_TOTAL}",
                    _batch_of(head_dim, rows),
                )
    yield Requirement(
        "default schedule / naive schedule, causal, D128, 16k",
        1.25,
        f"hopper: {BACKWARD}",
        f"hopper@naive: {BACKWARD}",
        lambda case: case.causal and _batch_of(128, 16384)(case),
    )
    for what, plain in ((MERGING, FORWARD), (ADDING, BACKWARD)):
        for head_dim in (128, 64):
            yield Requirement(
                f"{what} / plain, D{head_dim}, blocks of 8k x 8k",
                0.95,
                f"hopper: {what}",
                f"hopper: {plain}",
                _block_of(head_dim, 8192),
            )
    for heads, kv_heads, rows, least in (
        (32, 8, 16384, 0.97),
        (8, 1, 2048, 0.85),
        (8, 1, 4096, 0.85),
        (8, 1, 8192, 0.85),
    ):
        for what in (FORWARD, BACKWARD):
            for head_dim in (128, 64):
                yield Requirement(
                    f"{'MQA' if kv_heads == 1 else 'GQA'} {heads}/{kv_heads} / MHA {heads}, {what}, "
                    f"D{head_dim}, {rows // 1024}k",
                    least,
                    f"hopper: {what}",
                    f"hopper: {what}",
                    _heads_of(head_dim, rows, heads, kv_heads),
                )
    for ours in ("triton", "triton-dash"):
        for head_dim in (128, 64):
            yield Requirement(
                f"{ours} backward total / FlexAttention backward, D{head_dim}",
                1.0,
                f"{ours}: {BACKWARD_TOTAL}",
                f"flex: {BACKWARD_TOTAL}",
                _size_of(head_dim),
            )


def _size_of(head_dim: int) -> Callable[[Case], bool]:
    return lambda case: case.head_dim == head_dim


def _batch_of(head_dim: int, rows: int) -> Callable[[Case], bool]:
    """A batch of all tokens, with equal heads."""
    heads = HIDDEN // head_dim
    shape = (head_dim, rows, rows, TOKENS // rows, heads, heads)
    return lambda case: _shape(case) == shape


def _block_of(head_dim: int, rows: int) -> Callable[[Case], bool]:
    heads = HIDDEN // head_dim
    return lambda case: _shape(case) == (head_dim, rows, rows, 1, heads, heads)


def _heads_of(head_dim: int, rows: int, heads: int, kv_heads: int) -> Callable[[Case], bool]:
    return lambda case: _shape(case) == (head_dim, rows, rows, 1, heads, kv_heads)


def _shape(case: Case) -> tuple[int, ...]:
    """Nothing is wanted of cases with more of a mask than a causal one."""
    if case.window or case.documents:
        return ()
    return case.head_dim, case.rows, case.num_keys, case.batch, case.heads, case.kv_heads
