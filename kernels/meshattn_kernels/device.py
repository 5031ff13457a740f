"""The GPU that a launch goes to, and the host that prepares it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
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
    """Tensors on a device: those of the host as copies, in the order of the current stream.

    The host goes on at once. An ordinary copy waits for all that the stream has still to do, and a host that
    waits prepares nothing. Raises RuntimeError where a CUDA graph would hold a copy.
    """
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    with on_device(device):
        if torch.cuda.is_current_stream_capturing() and not all(tensor.is_cuda for tensor in tensors):
            raise RuntimeError(
                "a CUDA graph is being captured, and the tables of this mask are not on the GPU yet: call"
                " attention once with the same sequence, mask and sizes before the capture, forward and"
                " backward"
            )
        pinned = [tensor if tensor.is_cuda else tensor.pin_memory() for tensor in tensors]
        return [tensor.to(device, non_blocking=True) for tensor in pinned]


class Ready:
    """The point in the current stream of a GPU from which on there is what it has been given to make."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _current_stream(device)
        event: Any = torch.cuda.Event
        self._event = event()
        with on_device(device):
            self._event.record()

    def wait(self) -> None:
        """What is launched from now on comes after it, on another stream too."""
        if _current_stream(self._device) != self._stream:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def ready_on(device: torch.device) -> Ready | None:
    """The point up to now; None where everything is done at once."""
    return Ready(device) if device.type == "cuda" else None


def _current_stream(device: torch.device) -> int:
    return int(_cuda._cuda_getCurrentRawStream(device.index))


def on_host(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Tensors that the function makes lie on the CPU, whatever ``torch.set_default_device`` says."""

    @wraps(function)
    def made(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if torch.get_default_device().type == "cpu":  # the other way costs 10 us an operation
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return made
