"""Start the ranks of a test program as processes of their own, and end them all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Outcome(NamedTuple):
    """How one rank ended."""

    code: int | None  # None: killed here, because the time was over
    text: str


def run_processes(
    program: Path,
    arguments: Sequence[str],
    ranks: int,
    *,
    gpus: int,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Run a program on every rank, rank r on GPU r mod ``gpus``. A rank that ends does not end the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % gpus),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if ranks > gpus:
            # NCCL refuses two ranks of a host on one GPU: to it, each is a host of its own.
            place |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**os.environ, **place, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    deadline = time.monotonic() + timeout
    outcomes = []
    try:
        for process in processes:
            code: int | None
            try:
                text, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                code = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
                code = None
            outcomes.append(Outcome(code, text))
    finally:
        for process in processes:
            process.kill()
    return outcomes
