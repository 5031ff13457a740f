"""The GPU that a launch goes to, and the host that prepares it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_HERE: AbstractContextManager[Any] = nullcontext()
_cuda: Any = torch._C


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to this device; costs next to nothing where it is the current one."""
    # As torch.cuda.current_device, for a CUDA that is in use.
    return _HERE if device.index == _cuda._cuda_getDevice() else torch.cuda.device(device)


def multiprocessors(device: torch.device) -> int:
    """Of this GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_host(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Tensors that the function makes lie on the CPU, whatever ``torch.set_default_device`` says."""

    @wraps(function)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if torch.get_default_device().type == "cpu":  # the other way costs 10 us an operation
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return made
