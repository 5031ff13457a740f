"""Tables that launches in a CUDA graph read live as long as the graph does.

Kernels get their tables from caches, which forget. A launch that runs at once needs them no longer than that;
one that goes into a graph needs them again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


def keep(tables: object) -> None:
    """Called with what a launch on the current device reads beside the tensors that it is given."""
    if _here.kept is not None:
        _here.kept.append(tables)
    elif _cuda.is_initialized() and _cuda.is_current_stream_capturing():
        _for_good[id(tables)] = tables
