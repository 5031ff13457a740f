"""Tables are there when a launch reads them, and as long as a CUDA graph may repeat it.

Kernels get their tables from caches, which serve all streams, and forget. A launch on another stream than the
one that makes a table comes after that. One that runs at once needs them no longer than that; one that goes
into a graph needs them again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from meshattn_kernels.device import Ready

_cuda: Any = torch.cuda


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
    if _here.kept is not None:
        _here.kept.append(tables)
    elif _cuda.is_initialized() and _cuda.is_current_stream_capturing():
        _for_good[id(tables)] = tables
    elif ready is not None:
        ready.wait()
