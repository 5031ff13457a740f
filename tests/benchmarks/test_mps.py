"""NVIDIA's MPS as the virtual cluster starts and ends it, played by a script."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from virtual import mps

FAKE_MPS = """#!/bin/bash
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo "$CUDA_VISIBLE_DEVICES" > $pipe/up
    until [ -e $pipe/quit ] && [ -z "$DEAF" ]; do sleep 0.05; done
    exit
fi
read command
[ -e $pipe/up ] || exit 1
[ $command = quit ] && touch $pipe/quit
exit 0
"""


@pytest.fixture
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(FAKE_MPS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "_PATIENCE", 3.0)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("deaf", ["", "1"], ids=["obedient", "deaf"])
def test_mps_is_up_inside_and_gone_afterwards(
    deaf: str, fake_mps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEAF", deaf)
    started = []
    popen = subprocess.Popen

    def noted(*arguments: object, **options: object) -> object:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(mps.subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt), mps.multi_process_service(["GPU-a", "GPU-b"], fake_mps) as told:
        up = Path(told["CUDA_MPS_PIPE_DIRECTORY"]) / "up"
        assert up.read_text().strip() == "GPU-a,GPU-b"
        raise KeyboardInterrupt
    assert started[0].returncode == (-9 if deaf else 0)


def test_where_there_is_no_mps_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mps.NoMps, match="is not on this machine"), mps.multi_process_service([], tmp_path):
        pass
