"""The ranks of a virtual cluster: how they end, and that nothing outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import virtual_cluster
from virtual import undertaker
from waiting import eventually

SCRIPT = Path(virtual_cluster.__file__)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def crew(tmp_path: Path, *programs: str) -> virtual_cluster.Crew:
    made = virtual_cluster.Crew(tmp_path, grace=0.3)
    for program in programs:
        made.start([sys.executable, "-c", program], dict(os.environ), lambda: None)
    return made


SLEEP = "import time; time.sleep(600)"


def test_the_code_of_the_rank_that_fails_is_given_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with crew(tmp_path, SLEEP, "raise SystemExit('no more')") as ranks:
        assert ranks.wait(60) == 1
        pids = [rank.pid for rank in ranks._ranks]
    assert all(is_gone(pid) for pid in pids)
    said = capsys.readouterr().err
    assert "rank 1 ended with code 1" in said and "rank 1: no more" in said


def test_a_signal_is_a_failure_and_all_well_is_none(tmp_path: Path) -> None:
    with crew(tmp_path, SLEEP, "import os; os.kill(os.getpid(), 9)") as ranks:
        assert ranks.wait(60) == 128 + 9
    with crew(tmp_path, "pass", "pass") as ranks:
        assert ranks.wait(60) == 0


def test_past_the_time_all_is_ended_even_what_ranks_have_started_and_will_not_hear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "pid"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]); {deaf}"
    parent = parent.replace("subprocess.Popen(", f"open({str(note)!r}, 'w').write(str(subprocess.Popen(")
    parent = parent.replace(f"{deaf!r}])", f"{deaf!r}]).pid))", 1)
    with crew(tmp_path, "pass", parent) as ranks:
        assert eventually(lambda: note.exists() and note.read_text() != "", 20)
        assert ranks.wait(0.3) == 124
    assert "ranks [1] have not ended after 0.3 s" in capsys.readouterr().err
    assert eventually(lambda: is_gone(int(note.read_text())), 20)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=str
)
def test_nothing_outlives_the_cluster(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ranks, a process of a session of its own that a rank has started and that will not hear, the folder."""
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    rank = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {deaf!r}], start_new_session=True)
note = os.environ["NOTES"] + os.environ["RANK"]
with open(note + ".new", "w") as file:
    print(os.getpid(), child.pid, os.environ["{undertaker.FOLDER}"], file=file)
os.rename(note + ".new", note)
{SLEEP}
"""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--no-network", "--", "-c"]
    notes = [tmp_path / "note0", tmp_path / "note1"]
    cluster = subprocess.Popen(
        [*command, rank],
        env={**os.environ, "NOTES": str(tmp_path / "note")},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert eventually(lambda: all(path.exists() for path in notes), 20)
    cluster.send_signal(number)
    cluster.communicate(timeout=30)
    assert cluster.returncode == code
    for note in notes:
        *pids, folder = note.read_text().split()
        assert all(eventually(lambda pid=pid: is_gone(int(pid)), 20) for pid in pids)
        assert eventually(lambda folder=folder: not Path(folder).exists(), 20)
