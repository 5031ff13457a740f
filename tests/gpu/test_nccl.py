"""The same engine over NCCL: a rank a GPU, or two that share the only one and talk over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu.processes import run_processes

PROGRAM = Path(__file__).with_name("nccl_ranks.py")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_tile_over_nccl_equals_the_oracle() -> None:
    gpus = min(torch.cuda.device_count(), 8)
    outcomes = run_processes(PROGRAM, [], max(gpus, 2), gpus=gpus, timeout=280)
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}:\n{outcome.text[-4000:]}"
