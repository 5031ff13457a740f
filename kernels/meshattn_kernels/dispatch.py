"""Kernels by name. A name is honoured or refused, never replaced by another kernel."""

from __future__ import annotations

from collections.abc import Callable

from meshattn_kernels.contract import AttentionKernel
from meshattn_kernels.reference import ReferenceKernel

DEFAULT = "reference"
_KERNELS: dict[str, Callable[[], AttentionKernel]] = {"reference": ReferenceKernel}


def kernel_names() -> tuple[str, ...]:
    """Names that ``get_kernel`` takes."""
    return tuple(_KERNELS)


def get_kernel(name: str | None = None) -> AttentionKernel:
    """The kernel of that name, the default one for None. Raises ValueError for an unknown name."""
    chosen = DEFAULT if name is None else name
    if chosen not in _KERNELS:
        raise ValueError(
            f"kernel is {chosen!r}; choose one of {', '.join(_KERNELS)}, or None for the default"
        )
    return _KERNELS[chosen]()
