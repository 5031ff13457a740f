"""The figures of the README are those that the code gives; the planned ones are recomputed here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshattn.advice import layout_figures
from meshattn.layouts import LayoutKind
from meshattn.plan import CallShape, Tile, choose_tile, total_bytes
from meshattn_kernels import rules

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
PLANNED = re.findall(
    r"^\| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+x\d+) \| (\d+) % \|$", README, re.MULTILINE
)
WINDOWED = re.findall(
    r"^\| (\d+) \| ([\d.]+) \((\d+x\d+)\) \| (\d+) % \| ([\d.]+) \((\d+x\d+)\) \| (\d+) % \|$",
    README,
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
    for way in PASSES:
        ring, mesh = (2 * total_bytes(way, tile, shape) for tile in (Tile(1, 4), Tile(2, 2)))
        assert f"| bytes {way} | 0 | {ring:,} | {mesh:,} |" in README


def test_the_rule_of_the_kernels() -> None:
    oldest, unknown = rules.HOPPER_OLDEST_TRITON, rules.HOPPER_FIRST_UNKNOWN_TRITON
    known = [_dotted((3, minor)) for minor in range(10) if (3, minor) >= oldest and (3, minor) < unknown]
    lines = [line for line in README.splitlines() if line.startswith("| CUDA, compute capability")]
    hopper, portable = lines
    assert f"compute capability {_dotted(rules.HOPPER_CAPABILITY)}, triton {' or '.join(known)};" in hopper
    assert "; no softcap, no dropout |" in hopper
    assert f"| multiples of {rules.HOPPER_HEAD_DIM_STEP} up to {rules.HOPPER_MAX_HEAD_DIM} |" in hopper
    assert f"compute capability {_dotted(rules.LEAST_CAPABILITY)} or more |" in portable
    assert f"| up to {rules.MAX_HEAD_DIM} |" in portable
    assert all(f"`{name}`" in README for name in rules.RULES)


def test_the_table_was_found() -> None:
    assert len(PLANNED) == 6 and len(WINDOWED) == 3


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _both(tile: Tile, shape: CallShape) -> int:
    return sum(total_bytes(way, tile, shape) for way in PASSES)
