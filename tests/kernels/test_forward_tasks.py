"""Tasks of the Hopper forward: every block of rows with all its keys, the same parts for any workers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshattn_kernels import UNBOUNDED, BandIntervals

plans = pytest.importorskip("meshattn_kernels.hopper.plans", exc_type=ImportError)


@settings(max_examples=60, deadline=None)
@given(
    causal=st.booleans(),
    batch=st.integers(1, 3),
    kv_heads=st.sampled_from((1, 6, 25, 48)),
    group=st.sampled_from((1, 2)),
    rows=st.integers(1, 1200),
    keys=st.integers(1, 4000),
    block=st.sampled_from((128, 192)),
    workers=st.sampled_from((1, 132)),
)
def test_every_block_of_rows_meets_all_its_keys(
    causal: bool, batch: int, kv_heads: int, group: int, rows: int, keys: int, block: int, workers: int
) -> None:
    band = BandIntervals(0 if causal else -UNBOUNDED, UNBOUNDED, rows, keys)
    heads = kv_heads * group
    call = plans.Call(0, workers, batch, heads, kv_heads, rows, keys, 128, 128, True, None)
    starts, tasks, joins = plans.forward_tasks(band, call, block)
    assert len(starts) == workers + 1 and starts == sorted(starts)
    assert (starts[0], starts[-1]) == (0, len(tasks))
    alone = {tuple(task[:4]): task[4:6] for task in tasks if task[6] == 0}
    parts = {task[6]: task for task in tasks if task[6]}
    assert len(alone) + len(parts) == len(tasks)
    assert sorted(parts) == list(range(1, sum(join[4] for join in joins) + 1))
    for b, h, number, first, count, *_ in joins:
        runs = [parts[first + i + 1] for i in range(count)]
        assert count > 1 and all(run[:4] == [b, h, h // group, number] for run in runs)
        assert all(run[5] > 0 for run in runs)
        assert all(one[4] + one[5] == two[4] for one, two in pairwise(runs))
        assert (b, h, h // group, number) not in alone
        alone[b, h, h // group, number] = [runs[0][4], sum(run[5] for run in runs)]
    assert len(alone) == batch * heads * -(-rows // block)
    for (_, _, _, number), (first, count) in alone.items():
        last = min(keys, (number + 1) * block, rows) if causal else keys
        assert (first, count) == (0, -(-last // 128))
    for changed in (plans.replace(call, workers=7), plans.replace(call, delay=(16, 40))):
        _, others, joined = plans.forward_tasks(band, changed, block)
        assert sorted(others) == sorted(tasks) and joined == joins


def test_the_last_tasks_of_a_full_mask_end_together() -> None:
    rows, heads, workers = 16384, 16, plans.NOMINAL_WORKERS
    call = plans.Call(0, workers, 1, heads, heads, rows, rows, 128, 128, True, None)
    band = BandIntervals(-UNBOUNDED, UNBOUNDED, rows, rows)
    starts, tasks, _ = plans.forward_tasks(band, call, 128)
    tiles = [sum(task[5] for task in tasks[a:b]) for a, b in pairwise(starts)]
    fair = heads * (rows // 128) ** 2 / workers
    assert max(tiles) < 1.01 * fair < (rows // 128) * -(-heads * (rows // 128) // workers)


def test_workers_that_begin_late_have_so_much_less_to_do_and_end_with_the_others() -> None:
    rows, workers, late, units = 16384, 132, 16, 24
    call = plans.Call(0, workers, 1, 16, 16, rows, rows, 128, 128, True, None, delay=(late, units))
    starts, tasks, _ = plans.forward_tasks(BandIntervals(0, UNBOUNDED, rows, rows), call, 128)
    work = [sum(task[5] + plans.TASK_COST for task in tasks[a:b]) for a, b in pairwise(starts)]
    behind = sum(work) / workers * units / 64
    ends = [*work[:-late], *(behind + each for each in work[-late:])]
    assert max(ends) < 1.01 * sum(ends) / workers


@pytest.mark.parametrize(
    ("rows", "head_dim", "kv_heads", "full", "causal"),
    [
        (8192, 128, 8, 4, 4),
        (16384, 128, 8, 2, 4),
        (16384, 128, 2, 4, 4),
        (16384, 64, 8, 4, 4),
        (32768, 128, 8, 2, 2),
        (70000, 128, 8, 2, 2),
    ],
)
def test_heads_in_flight_are_few_where_the_keys_they_see_fill_the_cache(
    rows: int, head_dim: int, kv_heads: int, full: int, causal: int
) -> None:
    call = plans.Call(0, 1, 1, 8, kv_heads, rows, rows, head_dim, head_dim, True, None)
    for lo, wanted in ((-UNBOUNDED, full), (0, causal)):
        _, tasks, _ = plans.forward_tasks(BandIntervals(lo, UNBOUNDED, rows, rows), call, 128)
        assert [task[1] for task in tasks[: wanted + 1]] == [*range(wanted), 0]
