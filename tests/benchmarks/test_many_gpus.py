"""The one command for many GPUs: its steps parse, end in time, and one that fails leaves the others alone."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import many_gpus
import options
from meshattn import cli

EIGHT_MINUTES = 480


def parser_of(program: str) -> Callable[[list[str]], Any]:
    """Benchmarks share names with tests, so they are taken by path."""
    spec = importlib.util.spec_from_file_location("benchmark_program", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parse: Callable[[list[str]], Any] = module.parse
    return parse


@pytest.mark.parametrize("real", [True, False], ids=["real", "shared"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_step_gives_its_program_options_that_it_takes(ranks: int, real: bool, tmp_path: Path) -> None:
    steps = many_gpus.steps(ranks, real=real, out=tmp_path)
    assert sum(step.limit for step in steps) <= EIGHT_MINUTES
    for step in steps:
        program, *given = step.program
        if program == "-m":
            assert given[:2] == ["meshattn", "calibrate"]
            assert cli._parser().parse_args(given[1:]).out == tmp_path / many_gpus.TOPOLOGY
            continue
        assert Path(program).is_file()
        if program == str(many_gpus.TRAIN):
            parsed = options.parse(given)
            assert (
                options.choose_tile(parsed, ranks) and parsed.log_file == tmp_path / step.name / "log.jsonl"
            )
        else:
            assert parser_of(program)(given).out == str(tmp_path / step.name)


def test_real_ranks_are_torchruns_and_others_those_of_a_virtual_cluster() -> None:
    here, slow = many_gpus.Step("a", ("x.py", "-y"), 9), many_gpus.Step("b", ("x.py",), 9, 250)
    start = {
        (step.name, real): many_gpus.command(step, 4, real=real)
        for step in (here, slow)
        for real in (True, False)
    }
    assert start["a", True][1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "x.py",
        "-y",
    ]
    assert start["a", False][-3:] == ["--", "x.py", "-y"] and "--no-network" in start["a", False]
    for real in (True, False):
        assert start["b", real][start["b", real].index("--rate") + 1] == "250"
        assert "--no-network" not in start["b", real]


def test_a_step_that_fails_or_hangs_is_told_and_what_it_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_gpus, "command", lambda step, ranks, real: [sys.executable, *step.program])
    monkeypatch.setattr(many_gpus, "_SPARE", 0.2)
    programs = [
        many_gpus.Step("good", ("-c", "print('it works')"), 60),
        many_gpus.Step("bad", ("-c", "raise SystemExit(3)"), 60),
        many_gpus.Step("slow", ("-c", "import time; time.sleep(99)"), 0),
    ]
    outcomes = [many_gpus.run(step, 2, real=False, out=tmp_path) for step in programs]
    assert [outcome.code for outcome in outcomes] == [0, 3, 124]
    for kind, losses in (("mesh", [4.0, 2.0, 1.0]), ("ring", [4.0, 2.2])):
        lines = [json.dumps({"loss": loss, "tokens": 10, "seconds": 0.5}) for loss in losses]
        (tmp_path / f"train-{kind}").mkdir()
        (tmp_path / f"train-{kind}" / "log.jsonl").write_text("\n".join(lines))
    path = many_gpus.report(outcomes, 2, real=False, out=tmp_path)
    text = path.read_text()
    assert "it works" in text
    assert "mesh: 20 tokens/s" in text and "2 first steps differ by 9.1e-02" in text
    records = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    codes = {record["case"]: record["ours"] for record in records if record["metric"] == "code"}
    assert codes == {outcome.step.name: outcome.code for outcome in outcomes}
