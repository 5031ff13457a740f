"""The few calls of the CUDA driver that a copy-engine transport is made of, by ctypes.

PyTorch offers copies and events, but its wrappers cost 75 us of host time for one exchange, and it has no
wait of a stream for a value in memory. Addresses and streams are integers here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any, Protocol

import torch

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_WITH_FENCE = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: what came before on the stream is visible first
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_SUCCESS, _NOT_READY = 0, 600
_HIGH_PRIORITY = -1
_BUFFER_ID, _FROM_CUDA_MALLOC = 7, 10  # CU_POINTER_ATTRIBUTE_BUFFER_ID, .._IS_LEGACY_CUDA_IPC_CAPABLE
_NAN_BYTES = 4 * 2**20

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuStreamWriteValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuStreamWaitValue32_v2": (c_void_p, c_uint64, c_uint32, c_uint),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventQuery": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuPointerGetAttribute": (POINTER(c_uint64), c_int, c_uint64),
}


class CudaDriverError(RuntimeError):
    """A call of the driver failed; the message names the call and the error."""


class StreamOps(Protocol):
    """What is put on streams, in order: the driver's calls, or a simulation of them in the tests."""

    comm_stream: int

    def host_word(self) -> torch.Tensor:
        """A 32 bit word of 0 in memory of the host that streams can write."""
        ...

    def current_stream(self) -> int: ...
    def capturing(self) -> bool: ...
    def write(self, stream: int, address: int, value: int) -> None: ...
    def wait(self, stream: int, address: int, value: int) -> None: ...
    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None: ...
    def rescue_word(self, address: int, value: int) -> None: ...
    def rescue_fill(self, address: int, nbytes: int) -> None: ...
    def new_event(self) -> int: ...
    def record(self, event: int, stream: int) -> None: ...
    def wait_event(self, stream: int, event: int) -> None: ...
    def is_done(self, event: int) -> bool: ...
    def enter_thread(self) -> None: ...
    def synchronize(self) -> None: ...


def _functions(library: Any) -> dict[str, Any]:
    library = ctypes.CDLL("libcuda.so.1") if library is None else library
    functions = {}
    for name, arguments in _SIGNATURES.items():
        functions[name] = getattr(library, name)
        functions[name].argtypes = arguments
        functions[name].restype = c_int
    return functions


def _error(functions: dict[str, Any], call: str, status: int) -> CudaDriverError:
    text = c_char_p()
    functions["cuGetErrorName"](status, byref(text))
    name = text.value.decode() if text.value else "an unknown error"
    return CudaDriverError(f"{call}: {name} ({status})")


def enter_watching_thread(device: torch.device, library: Any = None) -> None:
    """Make the device current in a new thread, whose queries must not disturb a graph capture elsewhere."""
    torch.cuda.set_device(device)
    functions, call = _functions(library), "cuThreadExchangeStreamCaptureMode"
    status = functions[call](byref(c_int(_RELAXED)))
    if status != _SUCCESS:
        raise _error(functions, call, status)


class DeviceMemory:
    """What the driver knows of memory.

    Args:
        library: libcuda, or what stands in for it.
    """

    def __init__(self, library: Any = None) -> None:
        self._functions = _functions(library)
        self._get = self._functions["cuPointerGetAttribute"]
        self._value = c_uint64()

    def number(self, address: int) -> int:
        """A number of the allocation that an address lies in, which no other one ever has in this process."""
        return self._attribute(_BUFFER_ID, address)

    def is_from_malloc(self, address: int) -> bool:
        """Whether it was allocated as a whole, so that its number tells of all that happens to it."""
        return bool(self._attribute(_FROM_CUDA_MALLOC, address) & 1)

    def _attribute(self, attribute: int, address: int) -> int:
        value = self._value
        value.value = 0
        if status := self._get(byref(value), attribute, address):
            raise _error(self._functions, "cuPointerGetAttribute", status)
        return value.value


class CudaStreamOps:
    """The operations on one device, which must be current in every thread that calls them.

    Args:
        device: a CUDA device with an index.
        library: libcuda, or what stands in for it.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._device = device
        functions = _functions(library)
        self._write = functions["cuStreamWriteValue32_v2"]
        self._wait = functions["cuStreamWaitValue32_v2"]
        self._copy = functions["cuMemcpyDtoDAsync_v2"]
        self._copy_from_host = functions["cuMemcpyHtoDAsync_v2"]
        self._create = functions["cuEventCreate"]
        self._record = functions["cuEventRecord"]
        self._query = functions["cuEventQuery"]
        self._wait_event = functions["cuStreamWaitEvent"]
        self._functions = functions
        stream: Any = torch.cuda.Stream
        self._streams = [stream(device, priority=_HIGH_PRIORITY) for _ in range(2)]
        self.comm_stream, self._rescue_stream = (int(stream.cuda_stream) for stream in self._streams)
        self._words = torch.tensor([0, 1], dtype=torch.int32, pin_memory=True)
        self._nan = torch.full((_NAN_BYTES,), 255, dtype=torch.uint8, pin_memory=True)
        self._current: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def _failed(self, call: str, status: int) -> CudaDriverError:
        return _error(self._functions, call, status)

    def host_word(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def current_stream(self) -> int:
        return int(self._current(self._device.index))

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def write(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits, here or on a peer, when all before it on the stream has been done and is visible."""
        if status := self._write(stream, address, value, _WITH_FENCE):
            raise self._failed("cuStreamWriteValue32", status)

    def wait(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the 32 bits at an address of this device equal the value."""
        if status := self._wait(stream, address, value, _EQUAL):
            raise self._failed("cuStreamWaitValue32", status)

    def copy(self, stream: int, to: int, source: int, nbytes: int) -> None:
        if status := self._copy(to, source, nbytes, stream):
            raise self._failed("cuMemcpyDtoDAsync", status)

    def rescue_word(self, address: int, value: int) -> None:
        """Write 0 or 1 while other streams are blocked: a copy from the host needs no queue of theirs."""
        self._from_host(address, self._words.data_ptr() + 4 * value, 4)

    def rescue_fill(self, address: int, nbytes: int) -> None:
        """Write NaN of every float type while other streams are blocked."""
        for begin in range(0, nbytes, _NAN_BYTES):
            self._from_host(address + begin, self._nan.data_ptr(), min(_NAN_BYTES, nbytes - begin))

    def _from_host(self, address: int, source: int, nbytes: int) -> None:
        if status := self._copy_from_host(address, source, nbytes, self._rescue_stream):
            raise self._failed("cuMemcpyHtoDAsync", status)

    def new_event(self) -> int:
        event = c_void_p()
        if status := self._create(byref(event), _NO_TIMING):
            raise self._failed("cuEventCreate", status)
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        if status := self._record(event, stream):
            raise self._failed("cuEventRecord", status)

    def wait_event(self, stream: int, event: int) -> None:
        if status := self._wait_event(stream, event, 0):
            raise self._failed("cuStreamWaitEvent", status)

    def is_done(self, event: int) -> bool:
        status = self._query(event)
        if status not in (_SUCCESS, _NOT_READY):
            raise self._failed("cuEventQuery", status)
        return bool(status == _SUCCESS)

    def enter_thread(self) -> None:
        enter_watching_thread(self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
