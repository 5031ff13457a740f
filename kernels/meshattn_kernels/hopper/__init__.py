"""Kernels for Hopper GPUs (compute capability 9.0), in Gluon, which is part of Triton but no stable
interface."""

from __future__ import annotations

from meshattn_kernels.contract import AttentionKernel

OLDEST_TRITON = (3, 6)
FIRST_UNKNOWN_TRITON = (3, 8)
"""With 3.8 some variants spill kilobytes or have their products serialised, and 3.9 renames functions."""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def hopper_kernel() -> AttentionKernel:
    """The kernel object. Raises ValueError where Triton is missing or these kernels are not known to
    compile."""
    try:
        import triton
    except ImportError:
        raise ValueError(
            "triton is not installed; kernel 'hopper' needs it. Install it, or choose kernel='reference'"
        ) from None
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not OLDEST_TRITON <= version < FIRST_UNKNOWN_TRITON:
        raise ValueError(
            f"triton is {triton.__version__}; kernel 'hopper' needs {_dotted(OLDEST_TRITON)} or later "
            f"and less than {_dotted(FIRST_UNKNOWN_TRITON)}. Install such a version, or choose "
            "kernel='triton' or kernel='reference'"
        )
    from meshattn_kernels.hopper.kernel import HopperKernel

    return HopperKernel()
