"""The scripts: valid shell, options that fit together, and errors that are said once and stop every rank."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import options
import ranks

LAUNCH = Path(options.__file__).parent
SHELL = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])


def bash(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", *arguments], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_shell_scripts_parse(script: Path) -> None:
    assert bash("-n", str(script)).stderr == ""


@pytest.mark.parametrize("script", SHELL, ids=lambda script: script.name)
def test_commands_in_their_comments_parse_and_take_our_options(script: Path) -> None:
    starts = ("torchrun ", "launch/local.sh ", "mkdir ")
    lines = [line.lstrip("# ") for line in script.read_text().splitlines() if line.startswith("#     ")]
    commands = [line for line in lines if line.startswith(starts)]
    assert commands == lines
    for command in commands:
        assert bash("-n", text=command).stderr == ""
        parsed = options.parse(["--attention", *command.partition("--attention ")[2].split()])
        assert options.choose_tile(parsed, 4 if "local.sh" in command else 16) == parsed.tile


def test_both_launchers_are_there() -> None:
    assert {script.name for script in SHELL} == {"local.sh", "slurm.sbatch"}


@pytest.mark.parametrize("arguments", [[], ["0"], ["mesh"], ["--attention", "mesh"]])
def test_local_needs_a_number_of_ranks(arguments: list[str]) -> None:
    done = bash(str(LAUNCH / "local.sh"), *arguments)
    assert (done.returncode, "usage: launch/local.sh RANKS" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "num_ranks", "tile"),
    [
        (["--attention", "mesh"], 6, "auto"),
        (["--attention", "mesh", "--tile", "2x3"], 6, "2x3"),
        (["--attention", "ring"], 6, "1x6"),
        (["--attention", "ring", "--tile", "1x6"], 6, "1x6"),
        (["--attention", "ring", "--head-axis", "2"], 6, "1x3"),
        (["--attention", "single"], 1, "1x1"),
    ],
)
def test_tile_of_a_run(arguments: list[str], num_ranks: int, tile: str) -> None:
    assert options.choose_tile(options.parse(arguments), num_ranks) == tile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tile", "2x2"], "--tile 2x2 needs 4 ranks, but there are 6; tiles of 6: 1x6, 2x3, 3x2, 6x1"),
        (["--tile", "wide"], "tile 'wide'"),
        (["--attention", "ring", "--tile", "2x3"], "is the tile 1x6, not 2x3"),
        (
            ["--head-axis", "2", "--tile", "2x3"],
            "there are 3 for each of the 2 of --head-axis; tiles of 3: 1x3, 3x1",
        ),
        (["--head-axis", "4"], "--head-axis 4 must divide the 6 ranks"),
        (["--head-axis", "3"], "and the 4 heads of --heads"),
        (["--attention", "single"], "runs on one rank, but there are 6"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options.choose_tile(options.parse(arguments), 6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seq-len", "0"], "--seq-len is 0; it must be positive"),
        (["--seq-len", "1"], "no next token"),
        (["--documents", "1"], "--documents is 1; there is no next token"),
        (["--dropout", "1"], "--dropout is 1.0; it must be a probability below 1"),
        (["--softcap", "-2"], "--softcap is -2.0; it must not be negative"),
        (["--warmup", "-1"], "--warmup is -1; it must not be negative"),
        (["--weight-decay", "nan"], "--weight-decay is nan; it must not be negative"),
        (["--clip", "nan"], "--clip is nan; it must be positive"),
        (["--seed", "-1"], "--seed is -1; it must be a number from 0 to 2**63 - 1"),
        (["--timeout", "1e300"], "timeout is 1e+300: give seconds between 0.001 and 1e7"),
        (["--window", "-2"], "--window is -2; it must be a number of keys, or -1"),
        (["--dim", "100", "--heads", "3"], "dim 100 is not a multiple of heads 3"),
        (["--dim", "48", "--heads", "4"], "head size must be a multiple of 8"),
        (["--kv-heads", "3"], "heads 4 is not a multiple of kv_heads 3"),
        (["--attention", "tree"], "invalid choice: 'tree'"),
    ],
)
def test_wrong_options_end_with_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options.parse(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options.parse(arguments, speaks=False)
    assert capsys.readouterr().err == ""


def test_cuda_is_not_promised_where_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert str(ranks.choose_device("auto", 1, 2)[0]) == "cuda:1"
    assert ranks.choose_device("auto", 1, 3)[1] == "gloo on the CPU, as this machine has 2 GPUs for 3 ranks"
    assert str(ranks.choose_device("cpu", 0, 1)[0]) == "cpu"
    with pytest.raises(ValueError, match="3 ranks on this machine, but it has 2 GPUs"):
        ranks.choose_device("cuda", 0, 3)


def test_a_problem_of_one_rank_names_it_and_other_files_are_found() -> None:
    assert ranks.explain([(None, "same"), (None, "same")]) is None
    assert ranks.explain([("gone", ""), ("gone", "")]) == "gone"
    assert ranks.explain([(None, "same"), ("gone", "")]) == "gone (rank 1 of 2)"
    assert "rank 1 has 5 bytes, rank 0 has 6 bytes" in str(
        ranks.explain([(None, "6 bytes"), (None, "5 bytes")])
    )


@pytest.mark.parametrize("error", [SystemExit(2), None, RuntimeError("of one rank")], ids=str)
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_error_of_one_rank_on_a_gpu_waits_for_no_other(
    error: BaseException | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would keep it back until the others have come. Where all stop, all leave the group; and gloo's
    threads have to end."""
    init, destroy, calls = dist.init_process_group, dist.destroy_process_group, []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: init("gloo", **options))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(destroy()))
    expected = nullcontext() if error is None else pytest.raises(type(error))
    try:
        with expected, ranks.joined(torch.device(kind), "", 60):
            if error is not None:
                raise error
        assert len(calls) == (kind == "cpu" or not isinstance(error, RuntimeError))
    finally:
        if dist.is_initialized():
            destroy()


TELL_THREADS = """
import atexit, glob, sys
def tell():
    if any(name.endswith("train.py") for name in sys.argv):
        import os
        from pathlib import Path
        names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
        told = Path(__file__).with_name("threads-" + os.environ.get("RANK", "0"))
        told.write_text(" ".join(name for name in names if "gloo" in name))
atexit.register(tell)
"""
"""At the end of a rank: which threads of process groups are still there."""


@pytest.mark.parametrize(
    ("num_ranks", "arguments", "message"),
    [
        (2, ["--data", "/nowhere/at/all"], "--data /nowhere/at/all: no such file or folder"),
        (1, ["--seq-len", "1000000", "--data", __file__], "but a window is 1000000 bytes"),
        (2, ["--tile", "2x2"], "--tile 2x2 needs 4 ranks, but there are 2"),
        (1, ["--softcap", "1e300"], "softcap is 1e+300: give one from 1e-30 to 1e+30"),
        (2, ["--window", "3", "--kernel", "sdpa"], "kernel 'sdpa' takes no mask and causal"),
    ],
    ids=["missing-P2", "too-little-P1", "tile-P2", "softcap-P1", "window-of-sdpa-P2"],
)
def test_train_says_what_is_wrong_once_and_ends(
    num_ranks: int, arguments: list[str], message: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELL_THREADS)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(LAUNCH / "train.py")]
    if num_ranks > 1:
        command = ["bash", str(LAUNCH / "local.sh"), str(num_ranks)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("train.py: error:")
    assert done.stderr.count("train.py: error:") == 1
    assert done.stderr.count(message) == 1
    left = {path.read_text() for path in tmp_path.glob("threads-*")}
    assert left <= {""}, "a thread of a group that outlives the interpreter aborts the process"
