"""The GPU that a launch goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HERE: AbstractContextManager[Any] = nullcontext()
_cuda: Any = torch._C


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to this device; costs next to nothing where it is the current one."""
    # As torch.cuda.current_device, for a CUDA that is in use.
    return _HERE if device.index == _cuda._cuda_getDevice() else torch.cuda.device(device)


def multiprocessors(device: torch.device) -> int:
    """Of this GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
