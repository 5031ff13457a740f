"""What a kernel leaves behind when a wait does not end: a trap loses everything on the GPU, and printing
from it costs speed. So it writes four numbers to pinned memory first, and this process says at its end what
they mean."""

from __future__ import annotations

import atexit
import math
import sys
from functools import cache

import torch
from torch import Tensor

FAILED = 1
MOST_LOOKS = 2**31 - 2
"""Kernels give up behind that many, counted in int32."""
PATIENCE = 10.0
"""Seconds; no kernel gives up sooner."""
READS_PER_SECOND = 1_000_000
"""Of a counter that another block counts up, more or less."""


@cache
def mailbox(patience: float) -> Tensor:
    """Pinned int32 [5]. Kernels may write four: FAILED, worker, turn that was due, turn that came. One they
    read: how often they look before they give up, which takes so many seconds, but for very many. It lives as
    long as the process: graphs know its address."""
    box = torch.zeros(5, dtype=torch.int32, pin_memory=torch.cuda.is_available())
    box[4] = math.ceil(min(patience * READS_PER_SECOND, MOST_LOOKS))
    atexit.register(_report, box)
    return box


def describe(box: Tensor) -> str | None:
    """A sentence if a kernel has failed."""
    state, worker, wanted, seen, _ = box.tolist()
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
