"""The calls of the CUDA driver, on a stand-in for its library that is called through C as the real one is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshattn.transport import cuda_driver
from meshattn.transport.cuda_driver import CudaDriverError, CudaStreamOps, DeviceMemory, enter_watching_thread

NOT_READY, NOT_SUPPORTED = 600, 801
FAR = 0x7F12_3456_7000  # needs more than 32 bits, like every address of a GPU
STREAM = 0x7F99_0000_0010


class Library:
    """Notes every call with the values that arrive on the other side."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0
        self._functions = [self._export(name) for name in cuda_driver._SIGNATURES]

    def _export(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                arguments[1][0] = b"CUDA_ERROR_OF_THE_TEST"
                return 0
            if name == "cuEventCreate":
                arguments[0][0] = FAR + 1
                arguments = arguments[1:]
            if name == "cuPointerGetAttribute":
                arguments[0][0] = FAR + arguments[1]
                arguments = arguments[1:]
            if name == "cuThreadExchangeStreamCaptureMode":
                arguments = (arguments[0][0],)
            self.calls.append((name, *arguments))
            return self.status

        function = ctypes.CFUNCTYPE(ctypes.c_int, *cuda_driver._SIGNATURES[name])(called)
        setattr(self, name, function)
        return function


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, pin_memory, **options: make(*args, **options)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    streams = iter((SimpleNamespace(cuda_stream=STREAM), SimpleNamespace(cuda_stream=STREAM + 16)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: next(streams))
    for name in ("tensor", "full"):
        monkeypatch.setattr(torch, name, _unpinned(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    return Library()


def _ops(library: Library) -> CudaStreamOps:
    return CudaStreamOps(torch.device("cuda", 3), library)


def test_values_arrive_whole(library: Library) -> None:
    """Addresses, streams and sizes of more than 32 bits, in the order of the driver's signatures."""
    ops = _ops(library)
    assert (ops.comm_stream, ops.current_stream()) == (STREAM, 1003)
    ops.write(STREAM, FAR, 1)
    ops.wait(STREAM, FAR + 4, 1)
    ops.copy(STREAM, FAR, FAR + 2**40, 2**33 + 5)
    ops.rescue_word(FAR + 8, 1)
    ops.rescue_fill(FAR, 2**22 + 3)
    event = ops.new_event()
    ops.record(event, STREAM)
    ops.wait_event(STREAM, event)
    assert ops.is_done(event)
    assert library.calls == [
        ("cuStreamWriteValue32_v2", STREAM, FAR, 1, 0),
        ("cuStreamWaitValue32_v2", STREAM, FAR + 4, 1, 1),
        ("cuMemcpyDtoDAsync_v2", FAR, FAR + 2**40, 2**33 + 5, STREAM),
        ("cuMemcpyHtoDAsync_v2", FAR + 8, ops._words.data_ptr() + 4, 4, STREAM + 16),
        ("cuMemcpyHtoDAsync_v2", FAR, ops._nan.data_ptr(), 2**22, STREAM + 16),
        ("cuMemcpyHtoDAsync_v2", FAR + 2**22, ops._nan.data_ptr(), 3, STREAM + 16),
        ("cuEventCreate", 2),
        ("cuEventRecord", FAR + 1, STREAM),
        ("cuStreamWaitEvent", STREAM, FAR + 1, 0),
        ("cuEventQuery", FAR + 1),
    ]


def test_an_event_that_is_not_done(library: Library) -> None:
    ops = _ops(library)
    library.status = NOT_READY
    assert ops.is_done(FAR) is False


CALLS: dict[str, Callable[[CudaStreamOps], Any]] = {
    "cuStreamWriteValue32": lambda ops: ops.write(0, FAR, 1),
    "cuStreamWaitValue32": lambda ops: ops.wait(0, FAR, 1),
    "cuMemcpyDtoDAsync": lambda ops: ops.copy(0, FAR, FAR, 1),
    "cuMemcpyHtoDAsync": lambda ops: ops.rescue_word(FAR, 0),
    "cuEventCreate": lambda ops: ops.new_event(),
    "cuEventRecord": lambda ops: ops.record(1, 0),
    "cuStreamWaitEvent": lambda ops: ops.wait_event(0, 1),
    "cuEventQuery": lambda ops: ops.is_done(1),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_names_the_call(call: str, library: Library) -> None:
    ops = _ops(library)
    library.status = NOT_SUPPORTED
    with pytest.raises(CudaDriverError, match=rf"^{call}: CUDA_ERROR_OF_THE_TEST \(801\)$"):
        CALLS[call](ops)


def test_a_watching_thread_leaves_captures_alone(library: Library) -> None:
    enter_watching_thread(torch.device("cuda", 3), library)
    assert library.calls == [("cuThreadExchangeStreamCaptureMode", 2)]


def test_memory_is_known_by_a_number_of_its_allocation(library: Library) -> None:
    memory = DeviceMemory(library)
    assert memory.number(FAR + 5) == FAR + 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID
    assert memory.is_from_malloc(FAR + 5) == bool((FAR + 10) & 1)  # .._IS_LEGACY_CUDA_IPC_CAPABLE
    assert [call[0] for call in library.calls] == ["cuPointerGetAttribute"] * 2
    assert all(call[2] == FAR + 5 for call in library.calls)
    library.status = NOT_SUPPORTED
    with pytest.raises(CudaDriverError, match="cuPointerGetAttribute"):
        memory.number(FAR)
