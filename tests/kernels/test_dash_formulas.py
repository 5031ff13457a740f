"""The model of the DASH paper: its closed forms, its turns, and what the defaults reach against the bound."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise, product

import pytest
import torch

from meshattn_kernels import ArrayIntervals
from meshattn_kernels.dash import TURN_SHIFT, ScheduleTable, TileRanges, build_table, choose_schedule
from meshattn_kernels.dash.choice import heads_in_flight
from meshattn_kernels.dash.gantt import main
from meshattn_kernels.dash.model import MEASURED, Costs, simulate
from meshattn_kernels.tile_ranges import visible_ranges

CASES = [(4, 2, 0.25), (8, 16, 0.10), (8, 16, 0.50), (32, 2, 0.25), (32, 4, 1.00), (6, 1, 0.5), (5, 3, 0.3)]


def makespan(
    name: str, ranges: TileRanges, heads: int, workers: int, r: float, wave: int | None = None
) -> float:
    table = build_table(
        name, ranges, heads=heads, kv_heads=heads, workers=workers, heads_in_flight=1, wave=wave
    )
    return simulate(table, Costs(compute=1.0, reduce=r)).makespan


@pytest.mark.parametrize("n, m, r", CASES)
def test_full_mask(n: int, m: int, r: float) -> None:
    full = TileRanges.full(n, n)
    bound = m * n * (1 + r)
    assert makespan("naive", full, m, n, r) == pytest.approx(bound + (n - 1) * r)
    assert makespan("shift", full, m, n, r, n) == pytest.approx(bound)
    assert makespan("split_shift", full, m, n, r, n) == pytest.approx(bound)


@pytest.mark.parametrize("n, m, r", [case for case in CASES if case[1] % 2 == 0])
def test_causal_mask_of_an_even_number_of_heads(n: int, m: int, r: float) -> None:
    causal = TileRanges.causal(n, n)
    bound = m * (n + 1) * (1 + r) / 2
    assert makespan("naive", causal, m, n, r) == pytest.approx(m * (n * (1 + r) + (n - 1) * r))
    assert makespan("descending", causal, m, n, r) == pytest.approx(bound + (n - 1) * r)
    assert makespan("longest_first", causal, m, n, r) == makespan("descending", causal, m, n, r)
    assert makespan("symmetric_shift", causal, m, n, r, n // 2) == pytest.approx(bound)


def test_one_head_is_bound_by_its_first_tile() -> None:
    n, r = 8, 0.25
    causal = TileRanges.causal(n, n)
    for name in ("shortest_first", "descending"):
        table = build_table(name, causal, heads=1, kv_heads=1, workers=n)
        timeline = simulate(table, Costs(reduce=r))
        assert timeline.lower_bound == pytest.approx(n * (1 + r)) == timeline.makespan


def turns_of(table: ScheduleTable) -> dict[tuple[int, int, int], int]:
    steps = table.steps.tolist()
    return {
        (head, kv, entry & (1 << TURN_SHIFT) - 1): entry >> TURN_SHIFT
        for head, _, kv, first, count, *_ in table.tasks.tolist()
        for entry in steps[first : first + count]
    }


@pytest.mark.parametrize("n", [2, 3, 4, 8, 13])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_turns_of_the_shift(n: int, waves: int) -> None:
    """``fin`` tiles in earlier waves, ``run`` in this one, a the rank in it, q = (a + t) mod nq."""
    kv_tiles = n * waves
    table = build_table("shift", TileRanges.full(kv_tiles, n), heads=2, kv_heads=2, workers=n, wave=n)
    for (_, kv, q), turn in turns_of(table).items():
        fin, a = kv // n * n, kv % n
        assert turn == fin + (min(q, n - 1) - a) % n


@pytest.mark.parametrize("kv_tiles, wave, stride", list(product((2, 4, 8, 12), (1, 2, 3, 6), (1, 2))))
def test_turns_of_the_symmetric_shift(kv_tiles: int, wave: int, stride: int) -> None:
    """In pairs p: the long tile p, then the short one kv_tiles - 1 - p (even number of tiles)."""
    query_tiles, half = stride * kv_tiles, kv_tiles // 2
    causal = TileRanges.causal(kv_tiles, query_tiles)
    table = build_table("symmetric_shift", causal, heads=1, kv_heads=1, workers=wave, wave=wave)
    turns = turns_of(table)
    expected = {}
    for p in range(half):
        fin = p // wave * wave
        run, a = min(wave, half - fin), p - fin
        rect = stride * (fin + run - 1)
        for q in range(p * stride, query_tiles):
            done = fin + max(0, fin - (query_tiles - 1 - q) // stride)
            if q >= rect:
                expected[0, p, q] = done + (min(q - rect, run - 1) - a) % run
            else:
                expected[0, p, q] = done + (q - p * stride) // stride
        small = kv_tiles - 1 - p
        for q in range(small * stride, query_tiles):
            done = fin + max(0, fin - (query_tiles - 1 - q) // stride)
            expected[0, small, q] = done + run + (run - 1 - a)
    assert turns == expected


@pytest.mark.parametrize(
    "heads, kv_heads, tiles, mask, limit",
    [
        (1, 1, 64, "full", 1.10),
        (2, 2, 64, "full", 1.07),
        (16, 16, 32, "full", 1.07),
        (16, 16, 32, "causal", 1.12),
        (32, 8, 32, "full", 1.05),
        (8, 1, 64, "full", 1.10),
    ],
)
def test_defaults_stay_near_the_bound(heads: int, kv_heads: int, tiles: int, mask: str, limit: float) -> None:
    """With the measured costs of a kernel, and on the fewer workers that a transport leaves."""
    ranges = getattr(TileRanges, mask)(tiles, 2 * tiles)
    for workers in (128, 64):
        table = choose_schedule(ranges, heads=heads, kv_heads=kv_heads, head_dim=128, workers=workers)
        assert simulate(table, MEASURED).ratio < limit


def ranges_of(lengths: Sequence[int], q_tile: int) -> TileRanges:
    """Of packed documents."""
    borders = [0, *accumulate(lengths)]
    start = [border for border, end in pairwise(borders) for _ in range(border, end)]
    bounds = (torch.tensor(bound, dtype=torch.int32) for bound in (start, range(1, len(start) + 1)))
    intervals = ArrayIntervals(*bounds, len(start), len(start))
    return visible_ranges(intervals, len(start), len(start), q_tile, 128)


@pytest.mark.parametrize("seed", range(3))
def test_no_document_waits_for_the_next(seed: int) -> None:
    """Though they share query tiles, which is what keeps an order by length from the bound."""
    draw = random.Random(seed)
    ranges = ranges_of([draw.randint(1, 3000) for _ in range(8)], q_tile=64)
    table = choose_schedule(ranges, heads=16, kv_heads=16, head_dim=128, workers=132)
    by_length = build_table("longest_first", ranges, heads=16, kv_heads=16, workers=132)
    assert simulate(table, MEASURED).ratio < min(1.1, simulate(by_length, MEASURED).ratio - 0.1)


def test_documents_that_share_no_tile_are_walked_by_length() -> None:
    ranges = ranges_of([1024] * 16, q_tile=128)
    chosen = choose_schedule(ranges, heads=16, kv_heads=16, head_dim=128, workers=132)
    descending = build_table("descending", ranges, heads=16, kv_heads=16, workers=132)
    assert simulate(chosen).makespan < 0.95 * simulate(descending).makespan


def test_causal_descending_beats_naive_by_what_the_kernel_needs() -> None:
    causal = TileRanges.causal(64, 128)
    tables = [
        build_table(name, causal, heads=8, kv_heads=8, workers=132, heads_in_flight=8)
        for name in ("naive", "longest_first")
    ]
    naive, best = (simulate(table, MEASURED).makespan for table in tables)
    assert naive > 1.25 * best


def test_jitter_is_repeatable_and_never_helps_much() -> None:
    table = build_table("descending", TileRanges.causal(8, 16), heads=4, kv_heads=4, workers=8)
    shaken = [simulate(table, Costs(jitter=0.3, seed=seed)).makespan for seed in (1, 1, 2)]
    assert shaken[0] == shaken[1] != shaken[2]
    assert min(shaken) > 0.95 * simulate(table).makespan


def test_the_critical_path_is_a_chain_of_events() -> None:
    table = build_table("naive", TileRanges.full(5, 5), heads=1, kv_heads=1, workers=5)
    timeline = simulate(table, Costs(latency=0.5))
    path = timeline.critical_path()
    assert path[0].start == 0.0 and path[-1].end == timeline.makespan
    for event, following in pairwise(path):
        same_worker = event.worker == following.worker
        assert same_worker or (event.head, event.query) == (following.head, following.query)
        assert event.end <= following.begin
    assert any(event.after >= 0 for event in path)


@pytest.mark.parametrize("schedule", ["auto", "descending", "symmetric_shift"])
def test_a_schedule_is_drawn(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    wave = [] if schedule == "auto" else ["--wave", "3"]
    assert main(["--schedule", schedule, "--kv-tiles", "6", "--workers", "3", "--width", "60", *wave]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(len(line) == 67 for line in lines[:3])
    assert "ratio" in lines[3]


def test_a_picture_is_written(tmp_path: object) -> None:
    pytest.importorskip("matplotlib")
    path = f"{tmp_path}/schedule.png"
    assert main(["--schedule", "shift", "--mask", "full", "--kv-tiles", "4", "--output", path]) == 0
    with open(path, "rb") as file:
        assert file.read(4) == b"\x89PNG"


@pytest.mark.parametrize(
    ("head_dim", "rows", "full", "causal"),
    [(128, 4096, 8, 8), (128, 16384, 2, 8), (128, 32768, 1, 4), (64, 4096, 16, 32), (64, 65536, 1, 8)],
)
def test_heads_in_flight_are_few_where_their_rows_fill_the_cache_and_walks_are_long(
    head_dim: int, rows: int, full: int, causal: int
) -> None:
    assert heads_in_flight(head_dim, rows, uniform=True) == full
    assert heads_in_flight(head_dim, rows, uniform=False) == causal
