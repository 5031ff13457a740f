"""The demo: its formulas, what it finds wrong, its pictures, and (slow) a small run of the whole."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import demo
import options
import pictures
from meshattn.plan.assignment import Tile

MEASURED = demo.Run(
    tile=Tile(2, 2),
    dtype="float32",
    kernel="reference",
    loss=(5.5, 3.0),
    bytes_forward=40,
    bytes_backward=70,
    bytes_forward_formula=40,
    bytes_backward_formula=70,
    steps_per_s=2.0,
)
RUNS = {
    "single": replace(MEASURED, tile=Tile(1, 1)),
    "ring": replace(MEASURED, tile=Tile(1, 4), bytes_forward=60, bytes_forward_formula=60),
    "mesh": MEASURED,
}


def shape(*arguments: str) -> options.Options:
    return options.parse(["--dim", "64", "--heads", "4", "--layers", "3", *arguments])


def test_bytes_by_hand_for_both_tiles() -> None:
    """3 layers, 2 sequences of 130 tokens on 4 ranks: 33 rows, 4 heads, 16 four-byte numbers, lse."""
    chosen = shape("--seq-len", "130", "--batch-size", "2")
    rows = 2 * 33 * 4
    assert demo.formula("forward", Tile(1, 4), chosen) == 3 * 3 * rows * 32 * 4
    assert demo.formula("forward", Tile(2, 2), chosen) == 3 * rows * ((16 * 4 + 16 * 4 + 4) + 32 * 4)
    assert demo.formula("backward", Tile(1, 4), chosen) == 3 * 3 * rows * 32 * 8
    assert demo.formula("backward", Tile(2, 2), chosen) == 3 * rows * ((32 * 4 + 16 * 4 + 8) + 32 * 8)


def test_bytes_by_hand_in_bfloat16() -> None:
    """Chunks move as two-byte numbers, partial results as four-byte ones."""
    chosen = shape("--seq-len", "130", "--batch-size", "2", "--dtype", "bfloat16")
    rows = 2 * 33 * 4
    assert demo.formula("forward", Tile(1, 4), chosen) == 3 * 3 * rows * 32 * 2
    assert demo.formula("forward", Tile(2, 2), chosen) == 3 * rows * ((16 * 2 + 16 * 4 + 4) + 32 * 2)


def test_grouped_heads_favour_the_ring() -> None:
    line = demo.grouped_line(shape("--seq-len", "70", "--kv-heads", "1", "--layers", "1"))
    assert "(g = 4, one step, untrained)" in line
    assert "The ring wins here" in line
    assert "The tile that auto takes is 1x4." in line
    wide = demo.grouped_line(shape("--seq-len", "70", "--layers", "1"))
    assert "The mesh wins here" in wide


def test_runs_that_keep_their_promises_have_no_problems() -> None:
    assert demo.problems(RUNS) == []


def test_bfloat16_may_part_the_losses_further() -> None:
    apart = {name: replace(run, dtype="bfloat16") for name, run in RUNS.items()}
    apart["mesh"] = replace(apart["mesh"], loss=(5.5, 3.01))
    assert demo.problems(apart) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(MEASURED, bytes_forward=41), "mesh: 41 bytes sent forward, but the formula gives 40"),
        (replace(MEASURED, bytes_backward=0), "mesh: 0 bytes sent backward, but the formula gives 70"),
        (replace(MEASURED, loss=(5.5, 3.01)), "mesh: a loss differs from single by 3.3e-03 of it"),
    ],
)
def test_broken_promises_are_found(wrong: demo.Run, message: str) -> None:
    (found,) = demo.problems({**RUNS, "mesh": wrong})
    assert found.startswith(message)


def test_the_table_has_a_column_a_run_and_the_ratio_to_the_ring() -> None:
    lines = demo.table(RUNS).splitlines()
    assert lines[0].split() == ["single", "1x1", "ring", "1x4", "mesh", "2x2"]
    assert lines[1].split() == ["kernel", "reference", "reference", "reference"]
    assert len({len(line) for line in lines}) == 1
    (ratios,) = (line.split()[-3:] for line in lines if line.startswith("bytes forward, of ring"))
    assert ratios == ["0.667", "1.000", "0.667"]


def test_pictures_are_drawn_or_left_out_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    losses, differences = {name: run.loss for name, run in RUNS.items()}, {"ring": [0.0, 1e-7]}
    pictures.draw_assignments({"ring": Tile(1, 3), "mesh": Tile(3, 3)}, tmp_path / "assignment.png")
    pictures.draw_losses(losses, differences, tmp_path / "loss.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("assignment.png", "loss.png"))
    monkeypatch.setattr(pictures, "pyplot", None)
    pictures.draw_losses(losses, differences, tmp_path / "other.png")
    assert "other.png is left out: matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "other.png").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "file" / "folder")])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2 and "file/folder: Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_demo_from_start_to_end(tmp_path: Path) -> None:
    sizes = ["--steps", "3", "--seq-len", "131", "--batch-size", "1"]
    command = [sys.executable, demo.__file__, "--out", str(tmp_path), *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {name: run["tile"] for name, run in summary.items()} == {
        "single": "1x1",
        "ring": "1x4",
        "mesh": "2x2",
    }
    for run in summary.values():
        assert len(run["loss"]) == 3
        assert run["bytes_forward"] == run["bytes_forward_formula"]
        assert run["bytes_backward"] == run["bytes_backward_formula"]
        assert run["steps_per_s"] > 0
    assert (tmp_path / "table.txt").read_text().strip() in done.stdout
