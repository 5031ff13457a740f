"""Cases with a head axis, heads x a x b ranks, and what their ranks send."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import Shape
from mesh_cases import Case
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape, traffic
from meshattn.plan.heads import exchange, head_groups, inner_shape
from test_traffic import DIRECTIONS, Count, Flow, call_shape

SHAPE = Shape(B=2, S=29, H=12, H_kv=4, D=8, D_v=16)
GROUPED = Shape(B=3, S=23, H=16, H_kv=8, D=8)
Axes = tuple[int, int, int]


def axes_id(axes: Axes) -> str:
    w, a, b = axes
    return f"P{w * a * b}-{w}x{a}x{b}"


def head_case(axes: Axes, shape: Shape = SHAPE, **options: Any) -> Case:
    w, a, b = axes
    return Case(Tile(a, b), shape, heads=w, **options)


def formula(case: Case) -> dict[Flow, Count]:
    """What every rank sends, by phase, axis and flow."""
    outside = outside_shape(case)
    groups = head_groups(outside, case.heads) if case.head_groups == "auto" else int(case.head_groups)
    found = {}
    for direction in DIRECTIONS:
        moved = traffic(direction, case.tile, inner_shape(outside, case.heads))
        parts = {axes: Count(x.num_messages * groups, x.num_bytes) for axes, x in moved.items()}
        for way, part in exchange(direction, outside, case.heads, groups).items():
            parts["heads", way] = Count(part.num_messages, part.num_bytes)
        found |= {(direction, *flow): part for flow, part in parts.items() if part.messages}
    return found


def outside_shape(case: Case) -> CallShape:
    """The call as a rank has it outside of the head axis."""
    rows, key_rows = (chunks.rows // case.heads for chunks in (case.chunks, case.key_chunks))
    return replace(call_shape(case), rows=rows, key_rows=key_rows)
