"""Tables are there when a launch reads them, and as long as a CUDA graph may repeat it.

Kernels get their tables from caches, which serve all streams, and forget. A launch on another stream than the
one that makes a table comes after that. One that runs at once needs them no longer than that; one that goes
into a graph needs them again, and finds those that are kept from a run before, as a capture can make none.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch

from meshattn_kernels.device import Ready

T = TypeVar("T")
_cuda: Any = torch.cuda


class Tables(Generic[T]):
    """Tables by what they are made from: the last ``size`` of them, and all that somebody still keeps."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: OrderedDict[Hashable, T] = OrderedDict()
        self._alive: WeakValueDictionary[Hashable, T] = WeakValueDictionary()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Those of this key, made if need be."""
        found = self._alive.get(key)
        if found is None:
            found = self._alive[key] = make()
        self._last[key] = found
        self._last.move_to_end(key)
        if len(self._last) > self._size:
            self._last.popitem(last=False)
        return found


class _Keeping(threading.local):
    kept: list[object] | None = None


_here = _Keeping()
_for_good: dict[int, object] = {}
"""What launches in graphs of the user's read: nobody tells when those end."""


@contextmanager
def keeping() -> Iterator[list[object]]:
    """What launches of this thread read, for whoever puts them into a graph."""
    kept: list[object] = []
    before, _here.kept = _here.kept, kept
    try:
        yield kept
    finally:
        _here.kept = before


def keep(tables: object, ready: Ready | None = None) -> None:
    """Called with what a launch on the current device reads beside the tensors that it is given, and with the
    point from which on that is there, if a stream makes it. Graphs are captured after calls that waited."""
    captured = _cuda.is_initialized() and _cuda.is_current_stream_capturing()
    if _here.kept is not None:
        _here.kept.append(tables)
    elif captured:
        _for_good[id(tables)] = tables
    if ready is not None and not captured:
        ready.wait()
