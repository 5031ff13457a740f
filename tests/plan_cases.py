"""Cost sets of the plan tests: a query chunk takes 1000 units on the link."""

from __future__ import annotations

from meshattn.plan import Costs, Direction

UNIT = 1000
RATIOS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # block time / query chunk time
# Name -> query heads per KV head, and bytes of a moved partial against those of an input.
KINDS = {"mha": (1, 1), "mha-fp32": (1, 2), "gqa8": (8, 1), "gqa8-fp32": (8, 2)}


def costs(direction: Direction, kind: str, ratio: float, merge: int = 0) -> Costs:
    group, wide = KINDS[kind]
    backward = direction == "backward"
    return Costs(
        block=round(ratio * UNIT),
        row_in=2 * UNIT if backward else UNIT,
        col_in=2 * UNIT // group,
        row_out=wide * UNIT,
        col_out=wide * 2 * UNIT // group if backward else 0,
        merge=merge,
    )


def each_cost(direction: Direction, ratios: tuple[float, ...] = RATIOS) -> list[tuple[str, float, Costs]]:
    """All cost sets of a pass, with their kind and ratio."""
    return [(kind, ratio, costs(direction, kind, ratio)) for kind in KINDS for ratio in ratios]
