"""Schedule tables: every pair of tiles once, turns that are permutations, no deadlock, and the same sums on
any number of workers."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshattn_kernels import ArrayIntervals, BandIntervals
from meshattn_kernels.dash import (
    LOAD,
    SCHEDULES,
    STEP_PADDING,
    STORE,
    TURN_SHIFT,
    ScheduleTable,
    TileRanges,
    build_table,
    choose_schedule,
    visible_ranges,
)
from meshattn_kernels.dash.model import Deadlock, prove, simulate
from meshattn_kernels.dash.schedules import LINEAR

WORKERS = (132, 116, 66, 33, 1)
CHECK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def any_ranges(draw: st.DrawFn) -> TileRanges:
    """Full, causal, and irregular ranges, with tiles that nothing sees."""
    kv_tiles, query_tiles = draw(st.integers(1, 9)), draw(st.integers(1, 11))
    kind = draw(st.sampled_from(("full", "causal", "irregular")))
    if kind == "full":
        return TileRanges.full(kv_tiles, query_tiles)
    if kind == "causal":
        return TileRanges.causal(kv_tiles, query_tiles)
    bound = st.lists(st.integers(0, query_tiles), min_size=kv_tiles, max_size=kv_tiles).map(sorted)
    last = draw(bound)
    first = [min(a, b) for a, b in zip(draw(bound), last, strict=True)]
    return TileRanges(tuple(first), tuple(last), query_tiles)


group_of_heads = st.tuples(st.integers(1, 4), st.sampled_from((1, 2, 3, 8)))


def walk_of(table: ScheduleTable) -> dict[tuple[int, int, int], int]:
    """Turn of every (query head, key/value tile, query tile); fails on a pair that comes twice."""
    turns: dict[tuple[int, int, int], int] = {}
    steps = table.steps.tolist()
    for head, _, kv, first, count, _, _, _ in table.tasks.tolist():
        for entry in steps[first : first + count]:
            pair = head, kv, entry & (1 << TURN_SHIFT) - 1
            assert pair not in turns, f"{pair} comes twice"
            turns[pair] = entry >> TURN_SHIFT
    return turns


def dkv_order(table: ScheduleTable) -> dict[tuple[int, int], list[tuple[int, ...]]]:
    """Stores of each (key/value head, key/value tile), in the order of their turns: all they have summed."""
    stores: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
    steps, summed = table.steps.tolist(), []
    for head, kv_head, kv, first, count, flags, turn, _ in table.tasks.tolist():
        if flags & LOAD:
            summed = []
        queries = [entry & (1 << TURN_SHIFT) - 1 for entry in steps[first : first + count]]
        summed += [head << TURN_SHIFT | query for query in queries]
        if flags & STORE:
            stores.setdefault((kv_head, kv), []).append((turn, tuple(summed)))
    for tile, found in stores.items():
        expected = [-1] if len(found) == 1 else list(range(len(found)))
        assert sorted(turn for turn, _ in found) == expected, f"dkv turns of {tile}"
    return {tile: [part for _, part in sorted(found)] for tile, found in stores.items()}


def check_table(table: ScheduleTable, ranges: TileRanges, group: int) -> None:
    turns = walk_of(table)
    expected = {
        (head, kv, query)
        for head in range(table.heads)
        for kv in range(ranges.kv_tiles)
        for query in range(ranges.first[kv], ranges.last[kv])
    }
    assert turns.keys() == expected

    found: dict[tuple[int, int], list[int]] = {}
    for (head, _, query), turn in turns.items():
        found.setdefault((head, query), []).append(turn)
    for (_, query), ranks in found.items():
        assert sorted(ranks) == list(range(int(table.turns[query])))
    assert table.unseen.tolist() == [q for q in range(ranges.query_tiles) if (0, q) not in found]

    order = dkv_order(table)
    assert len(order) == table.kv_heads * ranges.kv_tiles
    assert max(map(len, order.values())) == table.max_dkv_turns

    inside, previous = False, None
    starts = set(table.worker_start.tolist())
    for number, (head, kv_head, kv, _, count, flags, _, reserved) in enumerate(table.tasks.tolist()):
        assert kv_head == head // group and reserved == 0
        assert inside != bool(flags & LOAD), "a key/value tile begins where none is in registers"
        assert flags & LOAD or (previous == (kv_head, kv) and number not in starts), "registers were lost"
        assert count > 0 or flags == LOAD | STORE
        inside, previous = not flags & STORE, (kv_head, kv)
    assert not inside
    assert table.worker_start[0] == 0 and table.worker_start[-1] == table.num_tasks
    assert len(table.worker_start) == table.workers + 1 and (table.worker_start.diff() >= 0).all()

    assert not table.steps[table.num_steps :].any() and len(table.steps) - table.num_steps == STEP_PADDING
    assert int((table.tasks[:, 3] + table.tasks[:, 4]).max()) <= table.num_steps
    for tensor in (table.worker_start, table.tasks, table.steps, table.turns, table.unseen):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    prove(table)


def check_default(ranges: TileRanges, heads: int, kv_heads: int, head_dim: int) -> None:
    """The same turns and sums for all numbers of workers, and each table is proved by itself."""
    tables = [
        choose_schedule(ranges, heads=heads, kv_heads=kv_heads, head_dim=head_dim, workers=workers)
        for workers in WORKERS
    ]
    check_table(tables[0], ranges, heads // kv_heads)
    turns, sums = walk_of(tables[0]), dkv_order(tables[0])
    for table in tables:
        assert table.invariant and table.min_workers == 1
        assert walk_of(table) == turns and dkv_order(table) == sums
        prove(table)


@CHECK
@given(
    ranges=any_ranges(),
    heads=group_of_heads,
    workers=st.integers(1, 40),
    name=st.sampled_from(SCHEDULES),
    in_flight=st.integers(1, 9),
    split=st.booleans(),
    wave=st.sampled_from((None, 0, 1, 2, 5)),
)
def test_named_schedules(
    ranges: TileRanges,
    heads: tuple[int, int],
    workers: int,
    name: str,
    in_flight: int,
    split: bool,
    wave: int | None,
) -> None:
    kv_heads, group = heads
    try:
        table = build_table(
            name,
            ranges,
            heads=kv_heads * group,
            kv_heads=kv_heads,
            workers=workers,
            heads_in_flight=in_flight,
            split_heads=split,
            wave=wave,
        )
    except ValueError:
        assume(name in LINEAR)  # a shift may not fit the mask or the workers; the others never fail
        raise
    check_table(table, ranges, group)
    assert not split or group == 1 or table.max_dkv_turns > 1 or not ranges.pairs


@CHECK
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 19)),
    heads=group_of_heads,
    workers=st.integers(1, 40),
    in_flight=st.integers(1, 9),
    data=st.data(),
)
def test_a_full_mask_with_some_tiles_in_pieces(
    sizes: tuple[int, int], heads: tuple[int, int], workers: int, in_flight: int, data: st.DataObject
) -> None:
    ranges, (kv_heads, group) = TileRanges.full(*sizes), heads
    begin = data.draw(st.integers(0, sizes[0]))
    pieces = data.draw(st.integers(2, 5))
    cut = begin, data.draw(st.integers(not begin, sizes[0] - begin)), pieces
    table = build_table(
        "longest_first", ranges, heads=kv_heads * group, kv_heads=kv_heads, workers=workers,
        heads_in_flight=in_flight, cut=cut,
    )  # fmt: skip
    check_table(table, ranges, group)
    prove(table)
    parts = torch.bincount(table.tasks[table.tasks[:, 6] >= 0, 2], minlength=sizes[0])
    whole = sizes[0] - sum(cut[:2])
    assert (parts[:whole] == 0).all()
    assert sizes[1] < 16 or (parts[whole:] >= 2 * kv_heads).all()


@pytest.mark.parametrize("heads, kv_heads", [(16, 16), (32, 8)])
def test_tiles_are_cut_where_workers_would_wait_and_end_apart(heads: int, kv_heads: int) -> None:
    ranges = TileRanges.full(128, 256)
    uncut = build_table("longest_first", ranges, heads=heads, kv_heads=kv_heads, workers=132)
    cut = choose_schedule(ranges, heads=heads, kv_heads=kv_heads, head_dim=128, workers=132)
    assert simulate(cut).makespan < 0.99 * simulate(uncut).makespan
    even = choose_schedule(TileRanges.full(132, 8), heads=16, kv_heads=16, head_dim=128, workers=132)
    assert even.max_dkv_turns == 1


@CHECK
@given(ranges=any_ranges(), name=st.sampled_from(sorted(LINEAR)), data=st.data())
def test_a_linear_order_is_one_where_each_walk_begins_when_the_last_has_ended(
    ranges: TileRanges, name: str, data: st.DataObject
) -> None:
    walks = LINEAR[name](ranges)
    tiles = zip(walks.first.tolist(), walks.length.tolist(), strict=True)
    # also walks that wrap round
    start = [data.draw(st.integers(first, first + max(length, 1) - 1)) for first, length in tiles]
    slot = torch.arange(len(start)) * ranges.query_tiles
    linear = replace(walks, start=torch.tensor(start))
    timed = replace(linear, slot=slot)
    assert torch.equal(linear.entries(3), timed.entries(3))
    queries = timed.entries() & (1 << TURN_SHIFT) - 1
    assert torch.equal(walks.visits(), torch.bincount(queries, minlength=ranges.query_tiles))


@CHECK
@given(ranges=any_ranges(), heads=group_of_heads, head_dim=st.sampled_from((16, 64, 128, 256)))
def test_the_default_gives_the_same_sums_on_any_number_of_workers(
    ranges: TileRanges, heads: tuple[int, int], head_dim: int
) -> None:
    kv_heads, group = heads
    check_default(ranges, kv_heads * group, kv_heads, head_dim)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("heads, kv_heads, tiles", [(1, 1, 48), (16, 16, 9), (8, 1, 16), (12, 4, 17)])
def test_defaults_of_larger_shapes(mask: str, heads: int, kv_heads: int, tiles: int) -> None:
    ranges = getattr(TileRanges, mask)(tiles, 2 * tiles - 1)
    check_default(ranges, heads, kv_heads, head_dim=128)


def test_a_linear_order_has_one_order_of_key_value_tiles_in_all_query_tiles() -> None:
    ranges = TileRanges.causal(7, 14)
    for name in ("naive", "descending", "shortest_first", "longest_first"):
        turns = walk_of(build_table(name, ranges, heads=2, kv_heads=2, workers=3))
        for query in range(14):
            seen = sorted((turn, kv) for (head, kv, q), turn in turns.items() if (head, q) == (1, query))
            ascending = [kv for _, kv in seen]
            assert ascending == sorted(ascending, reverse=name == "shortest_first")


@pytest.mark.parametrize(
    "name, mask", [("shift", TileRanges.full(6, 12)), ("symmetric_shift", TileRanges.causal(12, 24))]
)
def test_a_shift_needs_its_whole_wave(name: str, mask: TileRanges) -> None:
    table = build_table(name, mask, heads=3, kv_heads=3, workers=6, wave=6)
    assert table.min_workers == 6 and table.invariant
    with pytest.raises(ValueError, match=r"needs 6 workers.*there are 5"):
        build_table(name, mask, heads=3, kv_heads=3, workers=5, wave=6)
    assert not build_table(name, mask, heads=3, kv_heads=3, workers=5, wave=0).invariant


def test_the_proof_finds_a_shift_on_too_few_workers() -> None:
    table = build_table("shift", TileRanges.full(4, 4), heads=1, kv_heads=1, workers=4, wave=4)
    start = torch.tensor([0, 2, 4], dtype=torch.int32)  # two workers do the tasks of four
    two = ScheduleTable(**{**vars(table), "workers": 2, "worker_start": start})
    with pytest.raises(Deadlock, match=r"wait for ever: worker \d for turn \d at query tile"):
        prove(two)


def test_the_proof_finds_a_wrong_turn() -> None:
    table = build_table("naive", TileRanges.full(3, 3), heads=1, kv_heads=1, workers=3)
    steps = table.steps.clone()
    steps[0] += 1 << TURN_SHIFT
    with pytest.raises(Deadlock):
        prove(ScheduleTable(**{**vars(table), "steps": steps}))


def test_heads_of_a_group_stay_in_registers_only_where_tasks_fill_the_workers() -> None:
    def in_registers(kv_heads: int, tiles: int) -> bool:
        ranges = TileRanges.full(tiles, 2 * tiles)
        table = choose_schedule(ranges, heads=4 * kv_heads, kv_heads=kv_heads, head_dim=128, workers=132)
        return bool((table.tasks[:, 5] & STORE == 0).any())

    assert in_registers(kv_heads=8, tiles=64)
    assert not in_registers(kv_heads=1, tiles=16)


@CHECK
@given(
    band=st.tuples(st.integers(-40, 40), st.integers(0, 50)),
    sizes=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 9), st.integers(0, 9)),
    tiles=st.tuples(st.sampled_from((1, 3, 8)), st.sampled_from((1, 4, 8))),
)
def test_ranges_of_bands_and_of_their_arrays(
    band: tuple[int, int], sizes: tuple[int, int, int, int], tiles: tuple[int, int]
) -> None:
    lo, width = band
    n_q, n_k, pad_q, pad_k = sizes
    rows_q, rows_k = n_q + pad_q, n_k + pad_k
    intervals = BandIntervals(lo, lo + width, n_q, n_k)
    ranges = visible_ranges(intervals, rows_q, rows_k, *tiles)
    arrays = ArrayIntervals(*intervals.bounds(rows_q), n_q, n_k)
    assert visible_ranges(arrays, rows_q, rows_k, *tiles) == ranges
    assert visible_ranges(arrays, rows_q, rows_k, *tiles) is visible_ranges(arrays, rows_q, rows_k, *tiles)

    start, end = (bound.tolist() for bound in intervals.bounds(rows_q))
    assert (ranges.query_tiles, ranges.kv_tiles) == (-(-rows_q // tiles[0]), -(-rows_k // tiles[1]))
    for kv, (first, last) in enumerate(zip(ranges.first, ranges.last, strict=True)):
        t0, t1 = kv * tiles[1], min((kv + 1) * tiles[1], n_k)
        seen = {s // tiles[0] for s in range(n_q) if max(start[s], t0) < min(end[s], t1)}
        assert set(range(first, last)) == seen


@CHECK
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30), st.integers(0, 4))
def test_ranges_of_arrays_cover_all_pairs(moves: list[tuple[int, int]], padding: int) -> None:
    """Random bounds that never decrease, with empty rows inside."""
    start, end, low, high = [], [], 0, 0
    for a, b in moves:
        low += a
        high = max(high + b, low) if b else high
        low = min(low, high)
        start.append(low)
        end.append(high)
    n_q, n_k = len(moves), high
    bounds = [torch.tensor(x + [n_k] * padding, dtype=torch.int32) for x in (start, end)]
    ranges = visible_ranges(ArrayIntervals(*bounds, n_q, n_k), n_q + padding, n_k + 1, 2, 4)
    for kv, (first, last) in enumerate(zip(ranges.first, ranges.last, strict=True)):
        t0, t1 = 4 * kv, min(4 * kv + 4, n_k)
        seen = {s // 2 for s in range(n_q) if max(start[s], t0) < min(end[s], t1)}
        assert seen <= set(range(first, last))
        assert not seen or (first, last) == (min(seen), max(seen) + 1)
    check_table(choose_schedule(ranges, heads=2, kv_heads=1, head_dim=64, workers=3), ranges, 2)


def test_a_large_table_is_fast_and_kept() -> None:
    ranges = TileRanges.full(128, 256)
    begin = time.perf_counter()
    table = choose_schedule(ranges, heads=16, kv_heads=16, head_dim=128, workers=131)
    assert time.perf_counter() - begin < 1.0
    assert table.num_tasks >= 2048
    equal = TileRanges.full(128, 256)
    assert choose_schedule(equal, heads=16, kv_heads=16, head_dim=128, workers=131) is table


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "best"}, "there is no schedule 'best'; choose one of naive"),
        ({"workers": 0}, "at least one worker, not 0"),
        ({"heads": 3}, "3 query heads are no multiple of 2"),
        ({"name": "shift"}, "a shift needs every key/value tile"),
        ({"name": "symmetric_shift", "ranges": TileRanges((0, 0), (1, 2), 2)}, "needs a causal mask"),
        ({"ranges": TileRanges.full(1, 1 << 16)}, "a step entry has room for 32768"),
    ],
)
def test_what_a_user_asks_wrongly(arguments: dict[str, object], message: str) -> None:
    call: dict[str, object] = {
        "name": "naive",
        "ranges": TileRanges.causal(3, 3),
        "heads": 2,
        "kv_heads": 2,
        "workers": 4,
    }
    with pytest.raises(ValueError, match=message):
        build_table(**{**call, **arguments})  # type: ignore[arg-type]


def test_a_window_never_waits() -> None:
    first = tuple(range(20))
    ranges = TileRanges(first, tuple(min(20, q + 5) for q in first), 20)
    timeline = simulate(build_table("longest_first", ranges, heads=1, kv_heads=1, workers=20))
    assert timeline.makespan == timeline.longest


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tables_are_made_on_the_host(causal: bool) -> None:
    """Whatever the default device of a program is."""
    ranges = TileRanges.causal(5, 7) if causal else TileRanges.full(5, 7)
    sizes = {"heads": 6, "kv_heads": 3, "head_dim": 40 + causal, "workers": 11}
    with torch.device("meta"):
        table = choose_schedule(ranges, **sizes)
        assert walk_of(table) and table.tasks.device.type == "cpu"
        again = build_table("shortest_first", ranges, heads=6, kv_heads=3, workers=11)
    assert walk_of(again).keys() == walk_of(table).keys()


@pytest.mark.parametrize("tiles", [(), (0,), (0, 0, 0)], ids=lambda lengths: f"K{len(lengths)}")
def test_a_block_without_pairs_has_a_schedule(tiles: tuple[int, ...]) -> None:
    """Of no keys, or of keys that nobody sees."""
    ranges = TileRanges(tiles, tiles, 2)
    table = choose_schedule(ranges, heads=600, kv_heads=300, head_dim=64, workers=132)
    assert ranges.pairs == 0 and table.num_steps == 0
