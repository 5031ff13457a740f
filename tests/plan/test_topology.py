"""Topologies: files, presets, and the table of kernel times."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshattn.plan.kernel_times import BLOCK_PASSES, BlockTime, KernelTimes
from meshattn.plan.topology import Topology, kernel_times, load_topology, presets
from plan.topology_cases import FLAT, RATE, cluster


@pytest.mark.parametrize("name", presets())
def test_presets_load_and_survive_a_file(name: str, tmp_path: Path) -> None:
    topology = load_topology(name)
    assert topology.name == name and topology.across.gb_per_s < topology.inside.gb_per_s
    path = tmp_path / "cluster.json"
    path.write_text(topology.text())
    assert load_topology(path) == topology


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    for nodes in (2, 3):
        path.write_text(cluster(nodes).text())
        assert load_topology(path).gpus_per_node == nodes


def data(**changes: Any) -> dict[str, Any]:
    return {**cluster().as_data(), **changes}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node of a topology is 0"),
        ({"gpus_per_node": "8"}, "gpus_per_node of a topology is '8'"),
        ({"inside": {"gb_per_s": 0}}, "gb_per_s of a link is 0"),
        ({"between": {"gb_per_s": 5, "latency_us": -1}}, "latency_us of a link is -1"),
        ({"between": {"gbps": 5}}, "gbps"),
        ({"between": {"gb_per_s": 5, "sm_share": 1}}, "sm_share of a link is 1"),
        ({"kernels": "h999"}, "kernels 'h999': there is no such table"),
        ({"kernels": {"block_us": []}}, "no block in the table"),
        ({"kernels": {**FLAT.as_data(), "dtype": "int8"}}, "dtype is 'int8', but must be one of bf16, fp16"),
        ({"inside": {"gb_per_s": 5, "copy_engines": "yes"}}, "copy_engines of a link is 'yes'"),
        ({"kernels": {"block_us": [{"rows": 4}]}}, "block 0 has no head_dim"),
        ({"inside": {"gb_per_s": "370"}}, "gb_per_s of a link is '370'"),
        ({"inside": {"gb_per_s": 1e-320}}, "gb_per_s of a link is 1e-320"),
        ({"inside": {"gb_per_s": 5, "latency_us": float("inf")}}, "latency_us of a link is inf"),
        ({"inside": {"gb_per_s": 5, "latency_us": True}}, "latency_us of a link is True"),
        ({"gpus_per_node": True}, "gpus_per_node of a topology is True"),
        ({"name": [1]}, r"name of a topology is \[1\]"),
        ({"kernels": None}, "this is no table"),
        ({"kernels": []}, "this is no table"),
        ({"nodes": 3}, "has the unknown nodes"),
        ({"start_us": -1}, "start_us of a topology is -1"),
        ({"inside": None}, "must be a mapping, not NoneType"),
        ({5: 1, "nodes": 3}, "has the unknown 5, nodes"),
        ({"kernels": "h" * 5000}, "there is no such table"),
        ({"kernels": {**FLAT.as_data(), "dtype": ["bf16"]}}, r"dtype is \['bf16'\], but must be one of"),
    ],
    ids=str,
)
def test_refuses_with_the_name_of_what_is_wrong(changed: dict[Any, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        Topology.read(data() | changed, "some.yaml")
    assert "some.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rows", value) for value in (0, 1.5, 10**400, 1e308, True, None)),
        ("heads", 0.5),
        ("kv_heads", "8"),
        ("head_dim", [128]),
        *(("causal", value) for value in ("no", None, 1, [1])),
        *(("forward", value) for value in (0, True, "1", float("nan"), 10**400)),
        *(("workspace", value) for value in (-1, 1.5, None, 10**400)),
    ],
    ids=lambda value: str(value)[:9],
)
def test_refuses_blocks_that_no_time_can_be_computed_from(name: str, value: object) -> None:
    first, *others = FLAT.as_data()["block_us"]
    with pytest.raises(ValueError, match=f"kernel times: {name} of a block is "):
        KernelTimes.read({"block_us": [{**first, name: value}, *others]})


@pytest.mark.parametrize("name", ["inside", "kernels", "gpus_per_node", "name"])
def test_refuses_what_is_missing(name: str) -> None:
    lacking = data()
    del lacking[name]
    with pytest.raises(ValueError, match=f"lacks {name}"):
        Topology.read(lacking)


def test_unknown_sources_and_other_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"presets are .*dgx-h200"):
        load_topology("nowhere")
    path = tmp_path / "cluster.yaml"
    path.write_text("name: test\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ValueError, match="pip install PyYAML"):
        load_topology(path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"name": ' + "9" * 5000 + "}", "\udcff"], ids=["deep", "long", "bytes"]
)
def test_no_text_ends_in_another_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="is no topology"):
        load_topology(path)


def test_yaml_is_read_where_there_is_a_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: test\n")
    parser = ModuleType("yaml")
    parser.safe_load = lambda text: data() if text == "name: test\n" else None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yaml", parser)
    assert load_topology(path) == Topology.read(data())


def us(table: KernelTimes, what: str = "forward", **changes: Any) -> float:
    sizes: Mapping[str, Any] = {
        "heads": 3, "kv_heads": 3, "rows": 5000, "keys": 5000, "head_dim": 128, "causal": False, **changes,
    }  # fmt: skip
    return table.us(what, **sizes)  # type: ignore[arg-type]


def test_a_block_of_the_table_takes_the_time_written_there() -> None:
    table = kernel_times("h200")
    for block in table.blocks[::7]:
        sizes = {
            "heads": block.heads, "kv_heads": block.kv_heads, "rows": block.rows, "keys": block.rows,
            "head_dim": block.head_dim, "causal": block.causal,
        }  # fmt: skip
        for what in BLOCK_PASSES:
            assert us(table, what, **sizes) == pytest.approx(getattr(block, what), rel=1e-9)


def test_a_flat_rate_stays_flat_for_any_size() -> None:
    for rows, keys, heads, head_dim, causal in ((77, 3000, 5, 64, False), (9001, 9001, 64, 128, True)):
        work = rows * keys * heads * head_dim / RATE / (2 if causal else 1)
        time = us(FLAT, rows=rows, keys=keys, heads=heads, kv_heads=heads, head_dim=head_dim, causal=causal)
        assert time == pytest.approx(work)


def growing(rows: int, heads: int) -> BlockTime:
    time = rows**2 * heads / 100 + 50.0
    return BlockTime(128, heads, heads, rows, True, time, time, time, time)


def test_between_blocks_times_rise_and_beyond_them_the_rate_stays() -> None:
    table = KernelTimes("growing", tuple(growing(r, h) for r in (64, 256, 1024) for h in (2, 8)))
    sizes = [16, 64, 100, 128, 200, 256, 500, 1024, 3000, 9000]
    times = [us(table, rows=n, keys=n, causal=True, heads=4, kv_heads=4) for n in sizes]
    assert times == sorted(times)
    assert times[0] == pytest.approx(times[1]), "a smaller block than the smallest takes its time"
    most = [us(table, rows=n, keys=n, causal=True, heads=8, kv_heads=8) for n in sizes]
    assert most[-1] == pytest.approx(most[-2] * 9) and times[-1] == pytest.approx(times[-2] * 9, rel=0.01)
    assert times[-2] == pytest.approx(us(table, rows=1000, keys=9000, causal=True, heads=4, kv_heads=4))
    exact = [growing(n, 4).forward for n in sizes]
    assert all(0.8 < t / e < 1.25 for t, e in zip(times[1:8], exact[1:8], strict=True))
    full = us(table, rows=512, keys=512, heads=8, kv_heads=8)
    assert full == pytest.approx(2 * us(table, rows=512, keys=512, heads=8, kv_heads=8, causal=True))


def test_a_mask_that_the_table_lacks_has_the_rate_of_the_other() -> None:
    for causal in (True, False):
        some = KernelTimes("some", tuple(block for block in FLAT.blocks if block.causal == causal))
        for wanted in (True, False):
            assert us(some, causal=wanted) == pytest.approx(us(FLAT, causal=wanted))


def test_text_keeps_numbers() -> None:
    assert Topology.read(json.loads(cluster(7, start_us=1.5).text())) == cluster(7, start_us=1.5)
    assert math.isclose(FLAT.best_flops_per_us, 4 * RATE)


def test_files_from_before_types_were_written_are_read() -> None:
    old = data()
    old["kernels"] = {"kernel": "flat", "block_us": FLAT.as_data()["block_us"]}
    old["inside"] = {"gb_per_s": 3.0}
    table = Topology.read(old).kernels
    assert (table.dtype, str(table.where), table.describe()) == (None, "", "flat")
    assert table == FLAT


def test_where_times_come_from_is_kept_and_changes_no_plan() -> None:
    data = FLAT.as_data() | {"dtype": "fp16", "where": {"device": "a GPU", "versions": "v 1", "more": 2}}
    table = KernelTimes.read(data)
    assert (
        table.describe() == "flat, fp16, a GPU, v 1"
        and KernelTimes.read(table.as_data()).where == table.where
    )
    assert table == KernelTimes.read({**data, "where": {"device": "another"}}) != FLAT


def test_a_table_lacks_what_lies_outside_of_its_sizes() -> None:
    """And nothing between them, nor what it has."""
    table = KernelTimes("growing", (*(growing(r, h) for r in (64, 256) for h in (2, 8)), growing(1024, 2)))
    sizes: dict[str, Any] = {
        "heads": 4,
        "kv_heads": 4,
        "rows": 100,
        "keys": 100,
        "head_dim": 128,
        "causal": True,
    }
    for inside in ({}, {"heads": 8, "kv_heads": 8}, {"rows": 64, "keys": 64}, {"rows": 16, "keys": 1024},
                   {"heads": 2, "kv_heads": 2, "rows": 1024, "keys": 1024}):  # fmt: skip
        assert table.lacks(**sizes | inside) == ()
    for outside, says in (
        ({"heads": 16, "kv_heads": 16}, "16 heads (the table has 2 to 8)"),
        ({"rows": 512, "keys": 512}, "512 rows of 4 heads (the table has 64 to 256)"),
        ({"rows": 32, "keys": 64}, "45 rows of 4 heads"),
        ({"head_dim": 64}, "head size 64 (the table has 128)"),
        ({"causal": False}, "full blocks of query heads with key/value heads of their own"),
        ({"kv_heads": 2}, "causal blocks of query heads that share key/value heads"),
    ):
        (found,) = table.lacks(**sizes | outside)
        assert says in found
    alone = KernelTimes("alone", (growing(64, 2),))
    assert alone.lacks(**sizes | {"heads": 1, "kv_heads": 1, "rows": 8, "keys": 8}) == (
        "1 head (the table has 2)",
        "8 rows of 1 head (the table has 64)",
    )


def test_workspaces_are_those_of_the_table_and_grow_with_the_work_beyond_it() -> None:
    sizes = {(64, 2): 10, (256, 2): 100, (256, 8): 1000}
    blocks = tuple(replace(growing(r, h), workspace=size) for (r, h), size in sizes.items())
    shared = replace(growing(256, 8), kv_heads=2, workspace=7777)
    table = KernelTimes("growing", (*blocks, shared))

    def kept(keys: int, heads: int = 2, kv_heads: int | None = None, head_dim: int = 128) -> int:
        return table.workspace(
            heads=heads, kv_heads=kv_heads or heads, keys=keys, head_dim=head_dim, causal=True
        )

    assert [kept(64), kept(256), kept(256, 8), kept(256, 8, 2)] == [10, 100, 1000, 7777]
    assert [kept(1024), kept(32), kept(128, 8), kept(256, 2, None, 64)] == [400, 5, 500, 50]
    assert kept(128) == 50, "the more of both neighbours"
    assert kept(512, 4, 1) == 7777, "as many query heads of each key/value head"
    assert KernelTimes.read(table.as_data()) == table


def test_fewer_heads_than_the_table_has_are_priced_by_shorter_blocks() -> None:
    """Against what was measured: never more than the block of more heads takes, and seldom far off."""
    table = kernel_times("h200")
    some = KernelTimes("some", tuple(block for block in table.blocks if block.heads >= 8))
    ratios = []
    for block in table.blocks:
        sizes = {"rows": block.rows, "keys": block.rows, "head_dim": block.head_dim, "causal": block.causal}
        if block.heads < 8 and block.head_dim == 128:
            found = us(some, heads=block.heads, kv_heads=block.kv_heads, **sizes)
            group = block.heads // block.kv_heads
            assert found <= us(some, heads=8, kv_heads=8 // group, **sizes) * (1 + 1e-9)
            ratios.append(found / block.forward)
    ratios.sort()
    assert 0.9 < ratios[len(ratios) // 2] < 1.15 and ratios[0] > 0.8 and ratios[-1] < 2.1, ratios


@pytest.mark.parametrize("rows", [1024, 2048])
def test_long_blocks_of_few_heads_are_priced_by_short_ones_of_many(rows: int) -> None:
    """Of a table with one number of rows, against what was measured: its blocks of few heads leave most of a
    GPU idle, and by their own rate longer ones would take up to fifty times as long."""
    table = kernel_times("h200")
    some = KernelTimes("some", tuple(block for block in table.blocks if block.rows == rows))
    ratios = []
    for block in table.blocks:
        if block.head_dim == 128 and block.rows > rows and block.heads < 32:
            sizes = {"rows": block.rows, "keys": block.rows, "causal": block.causal}
            found = us(some, heads=block.heads, kv_heads=block.kv_heads, **sizes)
            ratios.append(found / block.forward)
    ratios.sort()
    assert ratios[0] > 0.8 and ratios[len(ratios) // 2] < 2 and ratios[-1] < 3.2, ratios
