"""The one command for many GPUs: its steps parse, end in time, and one that fails leaves the others alone."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import many_gpus
import options
import warm
from across_ranks import many_steps
from across_ranks.rank_cuts import cut_of
from meshattn import cli
from meshattn.plan import CallShape
from meshattn.plan.heads import inner_shape
from meshattn.plan.planner import cuts
from programs import BENCHMARKS, module_of
from virtual import undertaker
from waiting import eventually

SCALES = {name: many_steps.scale_of(8, gpus) for name, gpus in (("real", 8), ("shared", 2), ("cpu", 0))}
of_scales = pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)


@of_scales
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_step_gives_its_program_options_that_it_takes(
    ranks: int, scale: many_steps.Scale, tmp_path: Path
) -> None:
    steps = many_steps.steps(ranks, scale, tmp_path, commit="abc")
    for step in steps:
        program, *given = step.program
        if step.alone:
            assert program == warm.__file__
            parsed = warm.parse(given)
            assert parsed.block and parsed.full_block
        elif program == "-m":
            assert given[:2] == ["meshattn", "calibrate"]
            parsed = cli._parser().parse_args(given[1:])
            assert (
                parsed.out
                == tmp_path
                / {
                    "auto": many_steps.TOPOLOGY,
                    "p2p": many_steps.SOCKETS,
                }[parsed.transport]
            )
        elif program == str(many_steps.TRAIN):
            parsed = options.parse(given)
            assert options.choose_tile(parsed, ranks)
            assert parsed.log_file == tmp_path / step.name / "log.jsonl"
        else:
            assert Path(program).is_file()
            parsed = module_of(Path(program)).parse(given)
            assert (parsed.out, parsed.commit) == (str(tmp_path / step.name), "abc")
        assert parsed.kernel == (scale.kernel or None)


@of_scales
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_limits_together_are_eight_minutes(ranks: int, scale: many_steps.Scale, tmp_path: Path) -> None:
    have = many_gpus.EIGHT_MINUTES - many_gpus._SPARE
    steps = many_steps.steps(ranks, scale, tmp_path)
    assert sum(step.limit for step in steps) <= have
    assert many_gpus.limits(steps, have) == steps
    assert sum(step.limit for step in many_gpus.limits(steps, 60)) == pytest.approx(60)


@of_scales
def test_kernels_of_all_models_are_compiled_ahead(scale: many_steps.Scale, tmp_path: Path) -> None:
    def kinds(text: str) -> tuple[int, bool]:
        """Head size and whether heads share keys, which is what kernels are compiled for."""
        words = text.split()
        said = dict(itertools.pairwise(words))
        heads = int(said["--heads"])
        dim = int(said.get("--head-dim", 0)) or int(said["--dim"]) // heads
        return dim, int(said.get("--kv-heads", heads)) < heads

    if scale.device == "cuda":
        found = {
            step: {(dim, kv_heads < heads) for _, heads, kv_heads, dim in blocks}
            for step, blocks in scale.warmed.items()
        }
        wanted = {"slow-links": scale.slow, "train-mesh": scale.train}
        wanted |= dict.fromkeys(("tables", "million", "calibrate"), scale.model)
        for step, text in wanted.items():
            assert found[step] == {kinds(text)}, step
        assert found["self-test"] == {(128, True), (128, False)}


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_portable_kernels_are_compiled_ahead_for_every_number_of_heads(ranks: int, tmp_path: Path) -> None:
    scale = many_steps.scale_of(ranks, 1)
    steps = {step.name: list(step.program[1:]) for step in many_steps.steps(ranks, scale, tmp_path)}
    calibrated = cli._parser().parse_args(steps["calibrate"][1:])
    wanted = {"calibrate": set(zip(calibrated.heads, calibrated.kv_heads, strict=True))}
    grouped, plain = (CallShape(1, 1, 32, kv_heads, 128, 128, 2, 4, 4, True) for kv_heads in (8, 32))
    tested = [inner_shape(shape, cut.heads) for shape in (grouped, plain) for cut in cuts(ranks, grouped)]
    wanted["self-test"] = {(shape.heads, shape.kv_heads) for shape in tested}
    for name, program, option in (
        ("tables", "distributed.py", "tile"),
        ("million", "million_tokens.py", "cut"),
    ):
        parsed = module_of(BENCHMARKS / program).parse(steps[name])
        assert (parsed.heads, parsed.kv_heads, parsed.head_dim) == (32, 8, 128)
        (seq_len,) = parsed.seq_len if name == "tables" else [parsed.seq_len]
        whole = replace(grouped, rows=seq_len // ranks)
        inner = [inner_shape(whole, cut_of(cut).heads) for cut in getattr(parsed, option)]
        wanted[name] = {(one.heads, one.kv_heads) for one in inner}
        assert {(one.rows, one.heads) for one in inner} <= {block[:2] for block in scale.warmed[name]}
    for name, heads in wanted.items():
        assert heads <= {block[1:3] for block in scale.warmed[name]}, name


def test_only_what_is_run_is_compiled_ahead(tmp_path: Path) -> None:
    (warmed, _) = many_steps.steps(8, SCALES["real"], tmp_path, ["warm", "slow-links"])
    assert {block[3] for block in warm.parse(list(warmed.program[1:])).block} == {64}
    (warmed, _) = many_steps.steps(8, SCALES["real"], tmp_path, ["warm", "calibrate-nccl"])
    assert warm.parse(list(warmed.program[1:])).full_block
    (alone,) = many_steps.steps(8, SCALES["real"], tmp_path, ["warm"])
    assert {block[3] for block in warm.parse(list(alone.program[1:])).block} == {64, 128}


def test_all_kernels_are_compiled_though_one_fails(capfd: pytest.CaptureFixture[str]) -> None:
    options = "--device cpu --kernel reference --dtype float32 --full-block 17 3 3 8 --block 9 3 2 4"
    assert warm.main(options.split(" ")) == 1
    said = capfd.readouterr()
    assert len(said.out.splitlines()) == len(warm.FULL) and "17 rows, 3 heads of 3, size 8" in said.out
    assert said.err.count("9 rows, 3 heads of 2") == len(warm.CAUSAL) and "17 rows" not in said.err


def test_real_ranks_are_torchruns_and_others_those_of_a_virtual_cluster() -> None:
    here, slow = many_steps.Step("a", ("x.py", "-y"), 9), many_steps.Step("b", ("x.py",), 9, 250)
    start = {
        (step.name, name): many_gpus.command(step, 4, scale)
        for step in (here, slow)
        for name, scale in SCALES.items()
    }
    assert start["a", "real"][1:] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        "x.py",
        "-y",
    ]
    for name in ("shared", "cpu"):
        assert start["a", name][-3:] == ["--", "x.py", "-y"] and "--no-network" in start["a", name]
    for name, scale in SCALES.items():
        assert start["b", name][start["b", name].index("--rate") + 1] == "250"
        assert start["b", name][start["b", name].index("--device") + 1] == scale.device
        assert "--no-network" not in start["b", name]


SLOW = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("how I " + "was ended"))
print("began", flush=True)
time.sleep(99)
"""


def test_a_step_that_fails_or_hangs_is_told_and_what_it_said_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_gpus, "command", lambda step, ranks, scale: [sys.executable, *step.program])
    programs = [
        many_steps.Step("good", ("-c", "print('it works')"), 60),
        many_steps.Step("bad", ("-c", "raise SystemExit(3)"), 60),
        many_steps.Step("slow", ("-c", SLOW), 0.5),
        many_steps.Step("left", ("-c", ""), 60),
    ]
    outcomes = [many_gpus.run(step, 2, SCALES["shared"], tmp_path) for step in programs[:-1]]
    outcomes.append(many_gpus.Outcome(programs[-1]))
    assert [outcome.code for outcome in outcomes] == [0, 3, many_gpus.LATE, many_gpus.NOT_YET]
    for kind, losses in (("mesh", [4.0, 2.0, 1.0]), ("ring", [4.0, 2.2])):
        lines = [json.dumps({"loss": loss, "tokens": 10, "seconds": 0.5}) for loss in losses]
        (tmp_path / f"train-{kind}").mkdir()
        (tmp_path / f"train-{kind}" / "log.jsonl").write_text("\n".join(lines))
    (tmp_path / "slow" / "found.md").write_text("# Title\n\n## Half of it\n")
    (tmp_path / many_steps.TOPOLOGY).write_text("{}")  # a measurement that was cut short
    path = many_gpus.report(outcomes, 2, SCALES["shared"], tmp_path, commit="abc", predict=True)
    text = path.read_text()
    assert "commit abc" in text and "it works" in text and "cannot be told: ValueError" in text
    assert "mesh: 20 tokens/s" in text and "2 first steps differ by 9.1e-02" in text
    assert "\n### Half of it\n\nbegan\n" in text, "its own report, and the last that it said"
    assert "how I was ended" not in text
    assert "how I was ended" in (tmp_path / "slow" / "output.txt").read_text()
    ended = dict(re.findall(r"^\| (\w+) +\| ([\w ]+?) +\|", text, re.MULTILINE))
    assert ended["bad"] == "failed with code 3" and ended["left"] == "did not run"
    records = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    codes = {record["case"]: record["ours"] for record in records if record["metric"] == "code"}
    assert codes == {outcome.step.name: outcome.code for outcome in outcomes}


PROGRAMS = {
    "self_test.py": "--dtype float32 --heads 2 --kv-heads 1 --head-dim 8 --transport symmetric p2p",
    "distributed.py": "--seq-len 64 --head-dim 8 --rounds 1 --tile 2x1 --transport symmetric p2p",
    "million_tokens.py": "--seq-len 2048 --heads 2 --kv-heads 1 --head-dim 8 --dtype float32 --keys 8 "
    "--last 8 --cut 1x2 1x2 --transport symmetric p2p",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_transport_that_cannot_serve_costs_the_others_nothing(program: str, tmp_path: Path) -> None:
    options = [*PROGRAMS[program].split(), "--kernel", "reference", "--out", str(tmp_path)]
    cluster = [str(BENCHMARKS / "virtual_cluster.py"), "--ranks", "2", "--device", "cpu", "--no-network"]
    command = [sys.executable, *cluster, "--", str(BENCHMARKS / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert (
        "transport='symmetric' cannot serve this mesh: rank 0 had no CUDA device" in done.stdout + done.stderr
    )
    (records,) = tmp_path.glob("*.jsonl")
    assert "p2p" in records.read_text()


def test_what_a_step_starts_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_gpus, "command", lambda step, ranks, scale: [sys.executable, *step.program])
    monkeypatch.setenv("OF_THIS_TEST", str(tmp_path))
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], "
    step = many_steps.Step("parent", ("-c", f"{child}start_new_session=True)"), 60)
    assert many_gpus.run(step, 2, SCALES["cpu"], tmp_path).code == 0
    assert not undertaker.marked(str(tmp_path))


def in_turn(monkeypatch: pytest.MonkeyPatch, programs: list[many_steps.Step]) -> None:
    monkeypatch.setattr(many_gpus, "steps", lambda *_: programs)
    monkeypatch.setattr(many_gpus, "command", lambda step, ranks, scale: [sys.executable, *step.program])
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def codes_in(folder: Path) -> dict[str, int]:
    (path,) = folder.glob("*-many-gpus-4-*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {x["case"]: x["ours"] for x in found if x["metric"] == "code"}


def test_one_past_its_limit_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one behind those that end early may take what they have left."""
    sleep = "import time; time.sleep({})".format
    in_turn(
        monkeypatch,
        [
            many_steps.Step("hangs", ("-c", sleep(99)), 1),
            many_steps.Step("quick", ("-c", "pass"), 6),
            many_steps.Step("longer", ("-c", sleep(2)), 1),
        ],
    )
    arguments = ["--ranks", "4", "--out", str(tmp_path), "--seconds", str(many_gpus._SPARE + 8)]
    assert many_gpus.main(arguments) == 1
    assert codes_in(tmp_path) == {"hangs": many_gpus.LATE, "quick": 0, "longer": 0}


def test_steps_for_which_no_time_is_left_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(step: many_steps.Step, *_: object) -> many_gpus.Outcome:
        time.sleep(0.5)  # longer than its limit, as one that does not end at once
        return many_gpus.Outcome(step, 0, 0.5)

    in_turn(monkeypatch, [many_steps.Step(name, ("-c", "pass"), 60) for name in ("a", "train-mesh")])
    monkeypatch.setattr(many_gpus, "run", slow)
    earlier = tmp_path / "train-mesh" / "log.jsonl"
    earlier.parent.mkdir()
    earlier.write_text('{"loss": 1.0, "tokens": 1, "seconds": 1.0}\n' * 2)
    arguments = ["--ranks", "4", "--out", str(tmp_path), "--seconds", str(many_gpus._SPARE + 0.4)]
    assert many_gpus.main(arguments) == 1
    assert codes_in(tmp_path) == {"a": 0, "train-mesh": many_gpus.NO_TIME}
    (path,) = tmp_path.glob("*.md")
    text = path.read_text()
    assert "no time was left" in text and "tokens/s" not in text, "what an earlier run did is not told"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_one_that_is_stopped_ends_its_step_and_tells_what_there_is(
    number: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, many_gpus.__file__, "--ranks", "4", "--only", "self-test", "calibrate"]
    stopped = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OF_THIS_TEST": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    )
    started = tmp_path / "self-test" / "output.txt"
    assert eventually(lambda: started.exists() and "virtual cluster" in started.read_text(), 60)
    assert eventually(lambda: len(undertaker.marked(str(tmp_path))) > 5, 60)  # it, its step, four ranks
    stopped.send_signal(number)
    stopped.communicate(timeout=30)
    assert eventually(lambda: not undertaker.marked(str(tmp_path)), 60)
    if number != signal.SIGKILL:
        assert "all ranks have been ended" in started.read_text()
        for kind in ("md", "jsonl"):
            assert list(tmp_path.glob(f"*-many-gpus-4-cpu.{kind}"))
        assert codes_in(tmp_path) == {"self-test": many_gpus.STOPPED, "calibrate": many_gpus.NOT_YET}
