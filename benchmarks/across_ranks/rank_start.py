"""How a benchmark becomes several ranks, and what each of them runs on."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def start_ranks(ranks: int | None) -> None:
    """Become torchrun, with as many ranks as there are GPUs, else four."""
    count = ranks or torch.cuda.device_count() or 4
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *sys.argv]
    os.execv(sys.executable, [sys.executable, *command])


def join(timeout: float) -> torch.device:
    """Join the process group of torchrun; the device of this rank."""
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return device
