"""Launches of the ranks of a test program, of which several tests read their part.

A process takes seconds to come up on a GPU, so a launch runs many checks, and several launches go at once.
Where LAUNCH_LOGS names a folder, what the ranks of a launch said is kept there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu.processes import Outcome, run_processes

RANKS_AT_ONCE = 8  # without MPS the processes on a GPU have it in turns


@dataclass(frozen=True)
class Launch:
    """One start of a program on all ranks; rank r is on GPU r mod ``gpus``."""

    name: str
    arguments: Sequence[str]
    ranks: int
    gpus: int
    timeout: float = 150.0
    env: Mapping[str, str] = field(default_factory=dict)


class Launches:
    """Launches that run side by side, as many as may; in their order where they have to wait.

    One of more ranks than may run at once runs alone.
    """

    def __init__(self, program: Path, launches: Sequence[Launch]) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}
        self._running = 0
        self._turn = threading.Condition()
        self._waiting = list(launches)
        self._threads = {
            launch.name: threading.Thread(target=self._run, args=(program, launch)) for launch in launches
        }
        for thread in self._threads.values():
            thread.start()

    def _may_start(self, launch: Launch) -> bool:
        room = self._running == 0 or self._running + launch.ranks <= RANKS_AT_ONCE
        return self._waiting[0] is launch and room

    def _run(self, program: Path, launch: Launch) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._may_start(launch))
            self._waiting.remove(launch)
            self._running += launch.ranks
            self._turn.notify_all()
        outcomes = run_processes(
            program, launch.arguments, launch.ranks, gpus=launch.gpus, timeout=launch.timeout, env=launch.env
        )
        self._outcomes[launch.name] = outcomes
        if folder := os.environ.get("LAUNCH_LOGS"):
            text = [f"--- rank {rank}: {end.code}\n{end.text[-6000:]}" for rank, end in enumerate(outcomes)]
            (Path(folder) / f"{launch.name}.log").write_text("\n".join(text))
        with self._turn:
            self._running -= launch.ranks
            self._turn.notify_all()

    def outcomes(self, name: str) -> list[Outcome]:
        """How the ranks of a launch ended."""
        self._threads[name].join()
        return self._outcomes[name]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.join()
