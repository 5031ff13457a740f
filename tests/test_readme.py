"""The figures of the README are those of the code or of a report: planned ones are recomputed here, measured
ones looked up in the report that is linked beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshattn.advice import layout_figures
from meshattn.layouts import LayoutKind
from meshattn.plan import CallShape, Tile, choose_tile, total_bytes
from meshattn_kernels import rules

ROOT = Path(__file__).resolve().parents[1]
README, USAGE = (ROOT / "README.md").read_text(), (ROOT / "docs" / "usage.md").read_text()
PLANNED = re.findall(
    r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+x\d+) \| (\d+) % \|$", README, re.MULTILINE
)
WINDOWED = re.findall(
    r"^\| (\d+) \| ([\d.]+) \((\d+x\d+)\) \| (\d+) % \| ([\d.]+) \((\d+x\d+)\) \| (\d+) % \|$",
    USAGE,
    re.MULTILINE,
)
PASSES = ("forward", "backward")


@pytest.mark.parametrize("row", PLANNED, ids=lambda row: f"P{row[0]}-g{row[1]}")
def test_planned_traffic(row: tuple[str, ...]) -> None:
    ranks, group, ring, best, tile, less = row
    shape = CallShape(
        batch=1,
        rows=2**20 // int(ranks),
        heads=32,
        kv_heads=32 // int(group),
        head_dim=128,
        head_dim_v=128,
        itemsize=2,
        reduce_itemsize=4,
        acc_itemsize=4,
        causal=True,
    )
    chosen = choose_tile(int(ranks), shape)
    of_ring, of_best = (_both(t, shape) / 2**30 for t in (Tile(1, int(ranks)), chosen))
    assert str(chosen) == tile
    assert (f"{of_ring:.1f}", f"{of_best:.1f}") == (ring, best)
    assert f"{100 * (1 - of_best / of_ring):.0f}" == less


@pytest.mark.parametrize("row", WINDOWED, ids=lambda row: f"P{row[0]}")
def test_traffic_and_tiles_of_a_window(row: tuple[str, ...]) -> None:
    ranks = int(row[0])
    shape = CallShape(1, 2**20 // ranks, 32, 8, 128, 128, 2, 4, 4, causal=True)
    layouts: tuple[LayoutKind, LayoutKind] = ("striped", "contiguous")
    for number, layout in enumerate(layouts):
        found = layout_figures(layout, 2**20, ranks, shape, 4096, 0)
        sent = sum(found.sent_bytes.values()) / 2**30
        figures = (f"{sent:.2f}", str(found.tile), f"{100 * found.fill:.0f}")
        assert figures == row[1 + 3 * number : 4 + 3 * number]


def test_bytes_of_the_demo() -> None:
    """3 x 2048 tokens on four ranks, 2 layers, 2 heads of size 48, float32."""
    shape = CallShape(
        batch=3,
        rows=512,
        heads=2,
        kv_heads=2,
        head_dim=48,
        head_dim_v=48,
        itemsize=4,
        reduce_itemsize=4,
        acc_itemsize=4,
        causal=True,
    )
    forward, backward = (
        f"{total_bytes(way, Tile(2, 2), shape) / total_bytes(way, Tile(1, 4), shape):.2f}" for way in PASSES
    )
    assert f"{forward} of the ring's bytes forward and {backward} backward" in _flat(README)


def test_two_gpus() -> None:
    report = _linked("distributed-2-ranks-gpu")
    for kibi in (8, 16, 64):
        (case,) = re.findall(rf"^## B1-S{kibi * 1024}-.*?(?=^## |\Z)", report, re.MULTILINE | re.DOTALL)
        table = _rows(case)
        cells = [f"{kibi}k"]
        captured = ["8k, captured"]
        for name in ("1x2 symmetric", "1x2 p2p"):
            for line, row in ((cells, table[name]), (captured, table[f"{name} graph"])):
                line += [row[5], row[6], f"{row[9].strip('%')} / {row[10].strip('%')}"]
        assert f"| {' | '.join([*cells, table['torch cudnn'][5]])} |" in README
        assert kibi != 8 or f"| {' | '.join(captured)} | |" in README
        if kibi == 16:
            found = re.search(r"1x2 p2p exposes (\S+) of forward, (\S+) of backward", case)
            assert found and f"ours exposes {found[1]} forward and {found[2]} backward at 16k" in _flat(
                README
            )


def test_a_million_tokens() -> None:
    table = _rows(_linked("million-tokens"))
    ring, tile, heads, alone = (
        f"{float(table[name][1]) + float(table[name][2]):.1f} s"
        for name in ("1x2 symmetric", "2x1 symmetric", "2x1x1 symmetric", "kernel alone")
    )
    text = f"{ring} as a ring, {tile} as the tile 2x1, {heads} with a head axis."
    assert f"{text} The bound, the kernel alone, is {alone}" in _flat(README)


def test_slow_links() -> None:
    row = _linked("distributed-16-ranks-gpu-virtual").split("| of ring's |")[1]
    (cells,) = re.findall(r"^\| 4x4 p2p +\| (.*) \|$", row, re.MULTILINE)
    forward, sent, _, backward, returned, _ = (cell.split()[0] for cell in cells.split("|"))
    times = f"{forward} of the ring's time forward and {backward} backward"
    assert f"{times}, for {sent} and {returned} of its bytes" in _flat(README)


def test_emulated_gpus() -> None:
    report = _linked("scaling")
    tables = []
    for heads in ("MHA", "GQA"):
        title = f"### 256 GPUs, 1M tokens, causal, {heads}, dgx-h200 (50 GB/s a GPU)\n"
        tables.append(_rows(report.split(title)[1].split("\n### ")[0]))
    for method in ("ring", "double ring", "USP", "mesh, tile alone", "mesh with head axis"):
        cells = [cell for table in tables for cell in (table[method][4], table[method][5], table[method][-1])]
        assert f"| {method} | {' | '.join(cells)} |" in README
    taken = "### 256 GPUs, 1M tokens, causal, MHA, dgx-h200 (50 GB/s a GPU), exchanges between nodes take"
    beside = _rows(report.split(taken)[1].split("\n### ")[0])
    tile, both = (f"{beside[name][4]}" for name in ("mesh, tile alone", "mesh with head axis"))
    free, free_both = (tables[0][name][4] for name in ("mesh, tile alone", "mesh with head axis"))
    assert f"a tile alone has {tile} and a mesh with a head axis {both} times the ring's speed" in _flat(
        README
    )
    assert f"instead of {free} and {free_both}." in _flat(README)


def test_beside_flash_attention() -> None:
    table = _rows(_linked("kernels"))
    backward = "deterministic backward total / FA4"
    said = {
        "forward / FA4 forward, D128, 16k": "forward has {full} (full) and {causal} (causal)",
        f"{backward} deterministic, D128, 16k": "the deterministic backward {full} and {causal}",
        f"{backward} unordered (aim), D128, 16k": "one and {full} and {causal} of its other one",
        "forward / FA4 forward, D64, 16k": "at head size 64 causal the forward has {causal}",
        f"{backward} deterministic, D64, 16k": "and the backward {causal}",
    }
    for measure, words in said.items():
        found = dict(re.findall(r"(causal|full) S16384 ([\d.]+)", table[measure][2]))
        assert words.format(**found) in _flat(README)


def test_what_masks_cost() -> None:
    report, said = _linked("mask-costs", USAGE), _rows(USAGE)
    table = [[cell.strip() for cell in line.split("|")] for line in report.splitlines() if "| D" in line]
    found = {(case.split("-")[0], *way.split(), name): cells for _, case, way, name, *cells in table}
    for name, words in (
        ("documents", "documents of 1k tokens on average"),
        ("window", "a window of 1k keys"),
    ):
        assert said[words] == [words, *_costs(found, name, "hopper"), *_costs(found, name, "triton")[1:]]
    for name in ("softcap", "dropout"):
        pairs, *costs = _costs(found, name, "triton")
        assert said[name] == [name, pairs, "-", "-", *costs]


def _costs(found: dict[tuple[str, ...], list[str]], name: str, kernel: str) -> list[str]:
    """Its part of the pairs, and of the time with both head sizes."""
    each = [[found[size, kernel, way, name] for way in PASSES] for size in ("D128", "D64")]
    return [each[0][0][2], *(" / ".join(cells[1] for cells in both) for both in each)]


def test_the_rule_of_the_kernels() -> None:
    *known, newest = map(_dotted, rules.HOPPER_TRITONS)
    lines = [line for line in README.splitlines() if line.startswith("| CUDA, compute capability")]
    hopper, portable = lines
    assert (
        f"compute capability {_dotted(rules.HOPPER_CAPABILITY)}, triton {', '.join(known)} or {newest};"
        in hopper
    )
    assert "; no softcap, no dropout |" in hopper
    assert f"| multiples of {rules.HOPPER_HEAD_DIM_STEP} up to {rules.HOPPER_MAX_HEAD_DIM} |" in hopper
    assert f"compute capability {_dotted(rules.LEAST_CAPABILITY)} or more |" in portable
    assert f"| up to {rules.MAX_HEAD_DIM} |" in portable
    assert all(f"`{name}`" in README for name in rules.RULES)


def test_the_table_was_found() -> None:
    assert len(PLANNED) == 6 and len(WINDOWED) == 3


def _linked(name: str, text: str = README) -> str:
    """The report that the text links."""
    (path,) = set(re.findall(rf"\(\s*(?:\.\./)?(benchmarks/reports/[\d-]+-{name}\.md)\)", text))
    return (ROOT / path).read_text()


def _rows(report: str) -> dict[str, list[str]]:
    """The rows of its tables by their first cell, the first one of a name."""
    rows: dict[str, list[str]] = {}
    for line in re.findall(r"^\| (.*) \|$", report, re.MULTILINE):
        cells = [cell.strip() for cell in line.split(" | ")]
        rows.setdefault(cells[0], cells)
    return rows


def _flat(text: str) -> str:
    return " ".join(text.split())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _both(tile: Tile, shape: CallShape) -> int:
    return sum(total_bytes(way, tile, shape) for way in PASSES)
