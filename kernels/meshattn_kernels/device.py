"""The GPU that a launch goes to, and the host that prepares it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

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


def copied(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Tensors of the host on a device, for the current stream, there when this returns.

    They go by a stream of their own: an ordinary copy waits for all that the current stream has still to do,
    and a host that waits prepares nothing. Raises RuntimeError inside the capture of a CUDA graph.
    """
    if device.type != "cuda" or any(tensor.is_cuda for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured, and the tables of this mask are not on the GPU yet: call"
            " attention once with the same sequence, mask and sizes before the capture, forward and backward"
        )
    courier = _courier(device)
    with torch.cuda.stream(courier):
        copies = [tensor.to(device, non_blocking=True) for tensor in tensors]
    courier.synchronize()
    for copy in copies:
        copy.record_stream(torch.cuda.current_stream(device))  # its memory belongs to the courier
    return copies


@lru_cache
def _courier(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on_host(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Tensors that the function makes lie on the CPU, whatever ``torch.set_default_device`` says."""

    @wraps(function)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if torch.get_default_device().type == "cpu":  # the other way costs 10 us an operation
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return made
