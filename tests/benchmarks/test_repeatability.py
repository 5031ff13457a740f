"""The benchmark of repeatability, without a GPU: it must see a bit that changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import harness
import repeatability
import sanitize
from meshattn_kernels import UNBOUNDED, BandIntervals, get_kernel
from one_rank import contenders
from one_rank.attention_cases import Case

CASE = Case(16, True, 30, 1, 4, 2)


class Unsteady:
    """The reference kernel, which now and then gives another bit of one number."""

    def __init__(self, which: str, every: int) -> None:
        self._kernel, self._which, self._every, self._calls = get_kernel("reference"), which, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def forward(self, q: Any, k: Any, v: Any, acc: Any, *args: Any, **options: Any) -> None:
        self._kernel.forward(q, k, v, acc, *args, **options)
        self._calls += 1
        self._turn(acc)

    def backward(self, *args: Any, **options: Any) -> None:
        self._kernel.backward(*args, **options)
        self._turn({**args[6], **args[7]})

    def _turn(self, acc: dict[str, torch.Tensor]) -> None:
        if self._which in acc and self._calls % self._every == 0:
            acc[self._which].view(torch.int32).view(-1)[-1] ^= 1 << 12


def repeats(kernel: Any) -> repeatability.Repeats:
    inputs = contenders.make_inputs(CASE, torch.device("cpu"), torch.float32)
    return repeatability.Repeats(contenders.Ours(kernel, CASE, inputs))


def test_a_steady_kernel_repeats() -> None:
    assert repeats(get_kernel("reference")).count(5) == 0


@pytest.mark.parametrize("which", ["out", "lse", "dq", "dk", "dv"])
def test_one_bit_is_seen(which: str) -> None:
    assert repeats(Unsteady(which, every=4)).count(12) == 6


def test_what_is_left_of_an_earlier_run_is_seen() -> None:
    class Once:
        calls = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(get_kernel("reference"), name)

        def backward(self, *args: Any, **options: Any) -> None:
            if not self.calls:
                get_kernel("reference").backward(*args, **options)
            self.calls += 1

    assert repeats(Once()).count(3) == 3


def test_numbers_that_were_not_written_are_seen() -> None:
    class Idle:
        def __getattr__(self, name: str) -> Any:
            return getattr(get_kernel("reference"), name)

        def backward(self, *args: Any, **options: Any) -> None:
            pass

    with pytest.raises(RuntimeError, match="left numbers that it did not write"):
        repeats(Idle())


def test_a_digest_is_of_all_bits() -> None:
    digests = {
        repeats(kernel).digest()
        for kernel in (get_kernel("reference"), *(Unsteady(which, 1) for which in ("out", "lse", "dk")))
    }
    assert len(digests) == 4


@pytest.mark.parametrize("rows", [24, 37])
def test_every_mask_is_another(rows: int) -> None:
    settings = repeatability._settings([64], rows)
    assert len({str(setting) for setting in settings}) == len(settings)
    seen = set()
    for setting in settings:
        case = setting.case
        mask = setting.intervals(torch.device("cpu")) or BandIntervals(
            0 if case.causal else -UNBOUNDED, UNBOUNDED, rows, rows
        )
        assert not mask.is_empty
        seen.add((setting.mask, mask.num_pairs))
    assert len(seen) == len({pairs for _, pairs in seen}) == len(repeatability.MASKS)


@pytest.mark.timeout(300)
def test_a_trial_on_the_cpu(tmp_path: Path) -> None:
    repeatability.main(
        ["--device", "cpu", "--rows", "20", "--repeats", "2", "--head-dim", "64", "--out", str(tmp_path)]
    )
    (lines,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {record["peer"] for record in records} == {"wanted 0", "wanted 1"}
    assert all(record["ratio"] == 1 for record in records)


@pytest.mark.parametrize("program", [repeatability, sanitize], ids=["repeatability", "sanitize"])
def test_without_a_gpu(
    program: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        program.main([])
    assert ended.value.code == 2
    assert "no CUDA device is here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "verdict"), [("exit 0", "clean"), ("exit 9", "found errors"), ("exit 1", "ended with code 1")]
)
def test_verdicts_of_the_sanitizer(
    program: str, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{program}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "_run", lambda kernels: None)
    arguments = ["--tool", "memcheck", "--kernel", "triton", "--out", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(harness.Machine, "here", lambda commit: harness.Machine("a GPU", "1", commit, "2026"))
    if verdict == "clean":
        sanitize.main(arguments)
    else:
        with pytest.raises(SystemExit, match="not as wanted"):
            sanitize.main(arguments)
    (report,) = tmp_path.glob("*.md")
    assert verdict in report.read_text()
