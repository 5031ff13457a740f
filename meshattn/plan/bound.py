"""Times that no step list can beat in the model of ``makespan``: what a list is measured against."""

from __future__ import annotations

from .assignment import Tile
from .schedule import Channels, Costs, Direction


def num_merges(direction: Direction, tile: Tile) -> int:
    """Merges of received partials, one per outward hop."""
    return (tile.a - 1) + (tile.b - 1 if direction == "backward" else 0)


def lower_bound(direction: Direction, tile: Tile, costs: Costs, channels: Channels = "shared") -> int:
    """The plain bound, in the units of ``costs``.

    One channel: all compute, or all transfers. A channel per axis: all compute; the transfers of each
    channel; all KV in, one block with the last of them, every row out one after the other; backward also all
    row bundles in, one block, every column out.
    """
    a, b = tile.a, tile.b
    col_out = costs.col_out if direction == "backward" else 0
    compute = a * b * costs.block + num_merges(direction, tile) * costs.merge
    row = (a - 1) * (costs.row_in + costs.row_out)
    col = (b - 1) * (costs.col_in + col_out)
    if channels == "shared":
        return max(compute, row + col)
    through_rows = (b - 1) * costs.col_in + costs.block + (a - 1) * costs.row_out
    through_cols = (a - 1) * costs.row_in + costs.block + (b - 1) * col_out if direction == "backward" else 0
    return max(compute, row, col, through_rows, through_cols)


def tight_bound(direction: Direction, tile: Tile, costs: Costs, channels: Channels = "shared") -> int:
    """The plain bound, raised by what it leaves out: turn-around and idle compute, which rule at small P.

    Turn-around: chunk #k of a ring arrives after k hops, then all blocks of its line are computed, then its
    partial and all later ones leave. Idle compute: while the first chunks arrive, and once the last partials
    are on their way, there are fewer blocks to run than time (the same argument, backwards in time).
    """
    a, b = tile.a, tile.b
    bounds = [lower_bound(direction, tile, costs, channels)]
    bounds += _turn_around(a, costs.row_in, b * costs.block, costs.row_out)
    if direction == "backward":
        bounds += _turn_around(b, costs.col_in, a * costs.block, costs.col_out)
    # Block (0, 0) may fill a gap at the start or at the end; both, for no more than its time, if it is cut.
    spare = (0, 1)
    start = [_idle(tile, costs.row_in, costs.col_in, costs.block, channels, less) for less in spare]
    if direction == "backward":
        end = [_idle(tile, costs.row_out, costs.col_out, costs.block, channels, less) for less in spare]
    else:
        # From the start of the k-th last row out, only row #0 and the k - 1 rows after it may be computed.
        gaps = [[k * costs.row_out - (k * b - less) * costs.block for k in range(1, a)] for less in spare]
        end = [max([0, *gap]) for gap in gaps]
    if costs.cut is None:
        idle = min(start[0] + end[1], start[1] + end[0])
    else:
        idle = max(start[0] + end[0], start[1] + end[1] - costs.block)
    bounds.append(a * b * costs.block + idle)
    return max(bounds)


def _turn_around(size: int, cost_in: int, line: int, cost_out: int) -> list[int]:
    return [k * cost_in + line + (size - k) * cost_out for k in range(1, size)]


def _idle(tile: Tile, row_cost: int, col_cost: int, block: int, channels: Channels, less: int) -> int:
    """Least idle time of compute while the chunks of both axes arrive; ``less`` blocks are not to be had."""
    if channels == "per_axis":
        arrivals = {x * row_cost for x in range(1, tile.a)} | {y * col_cost for y in range(1, tile.b)}
        idle = 0
        for time in arrivals:
            rows = 1 + min(tile.a - 1, (time - 1) // row_cost) if row_cost else tile.a
            cols = 1 + min(tile.b - 1, (time - 1) // col_cost) if col_cost else tile.b
            idle = max(idle, time - block * (rows * cols - less))
        return idle
    # One channel: the best of all orders of arrival, built up over the rectangles of x rows and y columns.
    best = [[0] * tile.b for _ in range(tile.a)]
    for x in range(tile.a):
        for y in range(tile.b):
            time = x * row_cost + y * col_cost
            orders = []
            if x:
                orders.append(max(best[x - 1][y], time - block * (x * (y + 1) - less)))
            if y:
                orders.append(max(best[x][y - 1], time - block * ((x + 1) * y - less)))
            best[x][y] = min(orders, default=0)
    return best[-1][-1]
