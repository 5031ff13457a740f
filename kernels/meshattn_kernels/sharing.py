"""A kernel that leaves multiprocessors to others, where it knows how to."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

from meshattn_kernels import device as gpu
from meshattn_kernels.contract import AttentionKernel


def leave_room(kernel: AttentionKernel, device: torch.device, multiprocessors: int) -> AttentionKernel:
    """The kernel on that many multiprocessors of ``device`` less, with the same bits.

    Kernels without a field ``workers`` share the device as the hardware lets them, and come back as they are.
    """
    if multiprocessors == 0 or device.type != "cuda" or not hasattr(kernel, "workers"):
        return kernel
    workers = max(1, (kernel.workers or gpu.multiprocessors(device)) - multiprocessors)
    return cast(AttentionKernel, dataclasses.replace(cast(Any, kernel), workers=workers))
