"""NVIDIA's Multi-Process Service: kernels of several processes run on one GPU at once, not in turns."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAM = "nvidia-cuda-mps-control"
_PATIENCE = 10.0  # seconds, to come up and to go


class NoMps(RuntimeError):
    """It is not there, or does not start; the message says which."""


@contextmanager
def multi_process_service(
    gpus: Sequence[str], folder: Path, before: Callable[[], None] | None = None
) -> Iterator[dict[str, str]]:
    """Serve these GPUs; gives the environment of the processes that share them. Ends it with all it started.

    Args:
        gpus: UUIDs: numbers would mean other GPUs to the processes than to the service.
        folder: for its sockets and logs; a short path, as names of sockets are short.
        before: runs in the new process first.

    Raises:
        NoMps: where there is none.
    """
    program = shutil.which(PROGRAM)
    if program is None:
        raise NoMps(f"{PROGRAM} is not on this machine")
    clients = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in clients.values():
        Path(path).mkdir()
    environment = {**os.environ, **clients, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(folder / "mps.txt", "w") as said:
        control = subprocess.Popen(
            [program, "-f"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            preexec_fn=before,
        )
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _tell(program, "get_server_list", environment):
            if control.poll() is not None or time.monotonic() > deadline:
                why = (folder / "mps.txt").read_text().strip() or "it says nothing"
                raise NoMps(f"{PROGRAM} does not start: {why}")
            time.sleep(0.05)
        yield clients
    finally:
        _tell(program, "quit", environment)
        try:
            control.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(control.pid, signal.SIGKILL)
            control.wait()


def _tell(program: str, command: str, environment: dict[str, str]) -> bool:
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n",
            env=environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
