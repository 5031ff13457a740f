"""Launches of the ranks of a test program, of which several tests read their part.

A process takes seconds to come up on a GPU, so a launch runs many checks, and all launches that the tests of
a run ask for go at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu.processes import Outcome, run_processes


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
    """Launches that run side by side."""

    def __init__(self, program: Path, launches: Sequence[Launch]) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}
        self._threads = {
            launch.name: threading.Thread(target=self._run, args=(program, launch)) for launch in launches
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, program: Path, launch: Launch) -> None:
        self._outcomes[launch.name] = run_processes(
            program, launch.arguments, launch.ranks, gpus=launch.gpus, timeout=launch.timeout, env=launch.env
        )

    def outcomes(self, name: str) -> list[Outcome]:
        """How the ranks of a launch ended."""
        self._threads[name].join()
        return self._outcomes[name]

    def close(self) -> None:
        for thread in self._threads.values():
            thread.join()
