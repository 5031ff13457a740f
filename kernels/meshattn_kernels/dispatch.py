"""Kernels by name. A name is honoured or refused, never replaced by another kernel."""

from __future__ import annotations

from collections.abc import Callable

from meshattn_kernels.contract import AttentionKernel
from meshattn_kernels.reference import ReferenceKernel

DEFAULT = "reference"


def _hopper() -> AttentionKernel:
    from meshattn_kernels.hopper import hopper_kernel  # imports triton, and only when asked for

    return hopper_kernel()


def _triton() -> AttentionKernel:
    from meshattn_kernels.portable.kernel import TritonKernel

    return TritonKernel()


def _triton_dash() -> AttentionKernel:
    from meshattn_kernels.portable.kernel import TritonDashKernel

    return TritonDashKernel()


_KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "reference": ReferenceKernel,
    "hopper": _hopper,
    "triton": _triton,
    "triton-dash": _triton_dash,
}


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
