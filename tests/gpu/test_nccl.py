"""The same engine over NCCL: one process a GPU, started by torchrun as users start theirs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("nccl_ranks.py")


@pytest.mark.multigpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_every_tile_over_nccl_equals_the_oracle() -> None:
    ranks = min(torch.cuda.device_count(), 8)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]
    run = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-4000:]
