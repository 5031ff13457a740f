"""The DASH schedules (arXiv 2601.21824): the order of a deterministic backward as data.

``schedules`` says who visits what in which order, ``placement`` which worker does it, ``table`` writes both
down as what the kernels read; ``choice`` picks one for a shape, ``model`` proves that it ends and how long
it takes, ``gantt`` draws it.
"""

from meshattn_kernels.dash.choice import choose_schedule, heads_in_flight, named_schedule
from meshattn_kernels.dash.schedules import SCHEDULES, TURN_SHIFT
from meshattn_kernels.dash.table import LOAD, STEP_PADDING, STORE, ScheduleTable, build_table
from meshattn_kernels.tile_ranges import TileRanges, visible_ranges

__all__ = [
    "LOAD",
    "SCHEDULES",
    "STEP_PADDING",
    "STORE",
    "TURN_SHIFT",
    "ScheduleTable",
    "TileRanges",
    "build_table",
    "choose_schedule",
    "heads_in_flight",
    "named_schedule",
    "visible_ranges",
]
