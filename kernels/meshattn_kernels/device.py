"""The GPU that a launch goes to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to this device; costs next to nothing where it is the current one."""
    return nullcontext() if device.index == torch.cuda.current_device() else torch.cuda.device(device)


def multiprocessors(device: torch.device) -> int:
    """Of this GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
