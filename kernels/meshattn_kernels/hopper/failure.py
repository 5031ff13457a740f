"""What a kernel leaves behind when a wait does not end: a trap loses everything on the GPU, and printing
from it costs speed. So it writes four numbers to pinned memory first, and this process says at its end what
they mean."""

from __future__ import annotations

import atexit
import sys
from functools import lru_cache

import torch
from torch import Tensor

FAILED = 1


@lru_cache(maxsize=1)
def mailbox() -> Tensor:
    """Pinned int32 [4] that kernels may write: FAILED, worker, turn that was due, turn that came."""
    box = torch.zeros(4, dtype=torch.int32, pin_memory=True)
    atexit.register(_report, box)
    return box


def describe(box: Tensor) -> str | None:
    """A sentence if a kernel has failed."""
    state, worker, wanted, seen = box.tolist()
    if state != FAILED:
        return None
    return (
        f"meshattn: worker {worker} of the 'hopper' backward waited in vain for turn {wanted} of an ordered "
        f"sum, which stands at {seen}, and stopped the GPU context. All workers must be resident at once: is "
        "the GPU shared (time slices, a debugger)? Ask for fewer with HopperKernel(workers=...). Otherwise "
        "the schedule is wrong"
    )


def _report(box: Tensor) -> None:
    message = describe(box)
    if message is not None:
        print(message, file=sys.stderr, flush=True)
