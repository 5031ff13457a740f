"""Where a rank runs: its device, its process group, and how all ranks stop together when one cannot go on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """One rank of a run; `why` says in words why it runs on this device."""

    rank: int
    ranks: int
    device: torch.device
    why: str

    @property
    def leads(self) -> bool:
        return self.rank == 0


def choose_device(choice: str, local_rank: int, local_ranks: int) -> tuple[torch.device, str]:
    """The device of a rank and the reason; ValueError if CUDA is asked for and cannot serve every rank."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if choice == "cuda" and gpus < local_ranks:
        raise ValueError(f"--device cuda: {local_ranks} ranks on this machine, but it has {gpus} GPUs")
    if choice == "cuda" or (choice == "auto" and gpus >= local_ranks):
        return torch.device("cuda", local_rank), f"NCCL, {local_ranks} of {gpus} GPUs of this machine"
    if choice == "cpu":
        return torch.device("cpu"), "gloo on the CPU, as asked"
    here = f"{local_ranks} rank{'' if local_ranks == 1 else 's'}"
    return torch.device("cpu"), f"gloo on the CPU, as this machine has {gpus} GPUs for {here}"


@contextmanager
def joined(device: torch.device, why: str, timeout: float) -> Iterator[Place]:
    """Join the process group of torchrun, or one of this process alone, and leave it at the end.

    After an error on GPUs it is left only where all ranks agreed to stop: NCCL waits for the others, which
    may never come, and meanwhile nobody could read the error.
    """
    # The optimizer needs it. Imported while there is a group, it would hold it to the end of the process, and
    # a thread of the group that still works when the interpreter is taken down aborts the process.
    import torch._dynamo

    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    wait = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=wait)
    else:
        one = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=one, rank=0, world_size=1, timeout=wait)
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), device, why)
    except BaseException as error:
        if device.type == "cpu" or isinstance(error, SystemExit):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def agree(problem: str | None, facts: str) -> None:
    """Go on if no rank has a problem and all have the same facts; else rank 0 says why and all exit with 2.

    Collective. Without it a rank with an error of its own would leave the others waiting.
    """
    said: list[tuple[str | None, str]] = [(None, "")] * dist.get_world_size()
    dist.all_gather_object(said, (problem, facts))
    message = explain(said)
    if message is None:
        return
    if dist.get_rank() == 0:
        print(f"train.py: error: {message}", file=sys.stderr, flush=True)
    dist.barrier()  # whoever leaves first is taken for a crash, and rank 0 has to have spoken by then
    raise SystemExit(2)


def explain(said: list[tuple[str | None, str]]) -> str | None:
    """What is wrong with the (problem, facts) of all ranks, None if nothing is."""
    troubled = [rank for rank, (problem, _) in enumerate(said) if problem]
    if troubled:
        first = said[troubled[0]][0]
        return f"{first}" if len(troubled) == len(said) else f"{first} (rank {troubled[0]} of {len(said)})"
    other = next((rank for rank, (_, facts) in enumerate(said) if facts != said[0][1]), None)
    if other is None:
        return None
    return f"rank {other} has {said[other][1]}, rank 0 has {said[0][1]}; all ranks must read the same files"
