"""What a script is made of: exchanges, slots, groups of heads, the price of blocks, the pace of lists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshattn.plan import Direction, Tile
from meshattn.plan.block_cost import block_times, partial_us
from meshattn.plan.heads import head_groups
from meshattn.plan.kernel_times import KernelTimes
from meshattn.plan.pace import num_groups, pace_of
from meshattn.plan.passes import pass_script
from meshattn.plan.placement import Cut
from meshattn.plan.script import Exchange, Free, Kernel, Script, Slot
from meshattn.plan.timeline import run
from plan.topology_cases import FLAT, call, cluster


def test_the_first_block_of_a_line_is_cheaper_than_one_that_adds() -> None:
    blocks = tuple(replace(b, merging=3 * b.forward, adding=5 * b.backward) for b in FLAT.blocks)
    topology = replace(cluster(), kernels=KernelTimes("uneven", blocks))
    times = block_times(topology.kernels, call(300))
    new, more = times["forward"][1], times["merging"][1]

    def kernels(direction: Direction, tile: Tile) -> float:
        script = pass_script(direction, call(300), Cut(1, tile), topology)
        return sum(float(str(e.us)) for e in script.entries if isinstance(e, Kernel) and not e.steady)

    assert kernels("forward", Tile(2, 3)) == pytest.approx(2 * new + 4 * more)
    new, more = times["backward"][1], times["adding"][1]
    for tile in (Tile(1, 6), Tile(6, 1)):
        assert kernels("backward", tile) == pytest.approx(new + 5 * more)


def test_the_first_chunk_of_each_head_group_waits_for_what_stood_there_before() -> None:
    topology, cut = cluster(16), Cut(2, Tile(1, 4))
    shape = call(30000, heads=8, kv_heads=8)
    assert num_groups(shape, cut, topology) > 1
    script = pass_script("forward", shape, cut, topology)
    made = [e.made for e in script.entries if isinstance(e, Exchange) and e.axis == "col"]
    assert made == [True, False, False] * num_groups(shape, cut, topology)


def test_chunks_of_a_chain_wait_for_slots_that_are_filled_again() -> None:
    topology, cut = cluster(16, copy_engines=True), Cut(1, Tile(1, 9))
    script = pass_script("forward", call(300), cut, topology)
    freed = [entry.slot for entry in script.entries if isinstance(entry, Free)]
    filled = [entry.slot for entry in script.entries if isinstance(entry, Exchange) and entry.slot]
    assert len(filled) == 8 and len(set(filled)) == 3 and len(freed) == 8 - 3 and set(freed) <= set(filled)
    held: set[Slot] = set()
    for entry in script.entries:
        if isinstance(entry, Exchange) and entry.slot:
            assert entry.slot not in held
            held.add(entry.slot)
        elif isinstance(entry, Free):
            held.remove(entry.slot)
    assert not any(
        isinstance(e, Free) for e in pass_script("forward", call(9), Cut(1, Tile(3, 3)), topology).entries
    )


def test_heads_go_in_groups_one_under_way_while_another_is_computed() -> None:
    shape = replace(call(40_000), heads=32, kv_heads=32)
    groups = head_groups(shape, 4)
    assert groups > 1
    script = pass_script("forward", shape, Cut(4, Tile(1, 2)), cluster(4))
    assert script.num_exchanges == groups * (2 * 3 + 1)
    taking = cluster(2, sm_share=0.1)
    assert num_groups(shape, Cut(4, Tile(1, 2)), taking) == 1 < num_groups(shape, Cut(2, Tile(1, 2)), taking)
    names = [e.name for e in script.entries if isinstance(e, Exchange)]
    assert names.index("heads inward", 3) < names.index("kv 1"), "the next group comes in first"
    assert run(script, cluster(4)).exposed_us < run(script, cluster(4, inside=1.0)).exposed_us


def test_parts_of_a_block_lie_between_nothing_and_all() -> None:
    times = [partial_us(part / 8, half=3.0, whole=10.0) for part in range(9)]
    assert times == sorted(times) and (times[0], times[4], times[8]) == (0, 3.0, 10.0)
    assert times[2] == 1.5 and times[6] == 6.5


def test_paces_follow_the_links() -> None:
    topology = cluster(4, inside=100.0, between=10.0)
    pace = pace_of(topology, Cut(1, Tile(4, 2)), ("row", "col", "heads"))
    assert (pace.row, pace.col, pace.channels) == (1, 10, "per_axis")
    pace = pace_of(topology, Cut(1, Tile(4, 2)), ("col", "row", "heads"))
    assert (pace.row, pace.col, pace.channels) == (10, 1, "per_axis")
    shared = replace(topology, gpus_per_nic=2)
    assert pace_of(shared, Cut(1, Tile(4, 2)), ("row", "col", "heads")).col == 20
    assert pace_of(topology, Cut(1, Tile(2, 2)), ("row", "col", "heads")).channels == "shared"


def test_programs_wait_for_all_that_they_start() -> None:
    script: Script = pass_script("backward", call(100), Cut(4, Tile(2, 3)), cluster())
    numbers = [entry.number for entry in script.entries if isinstance(entry, Exchange)]
    assert len(numbers) == len(set(numbers))
