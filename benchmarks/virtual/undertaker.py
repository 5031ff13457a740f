"""Ends what a virtual cluster has left behind, however that ended: a process that outlives it and waits.

Ranks ask the kernel to be ended with the cluster, but what they have started does not, nor does the server
that MPS starts for its clients. All of them, and nobody else, have the cluster's folder in a variable of
their environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "VIRTUAL_CLUSTER_FOLDER"
_PATIENCE = 5.0  # seconds that those who are killed have to be gone
_IN_USE = 0.1  # seconds between two looks


@contextmanager
def undertaker(folder: Path) -> Iterator[dict[str, str]]:
    """Gives the environment of those who shall not outlive this block, nor this process; they and the folder,
    which is a new one, are gone behind it."""
    command = [sys.executable, "-I", "-S", __file__, str(folder)]
    unmarked = {name: value for name, value in os.environ.items() if name != FOLDER}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=unmarked, start_new_session=True):
        # At the end of this block that process is told, by the end of the pipe, and waited for.
        yield {FOLDER: str(folder)}


def marked(folder: str) -> list[int]:
    """Processes that have the folder in the environment that they began with."""
    mark = f"={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if mark in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def main() -> None:
    folder = sys.argv[1]
    sys.stdin.buffer.read()  # until the cluster has ended
    deadline = time.monotonic() + _PATIENCE
    while (left := marked(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_IN_USE)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
