"""Kernels for Hopper GPUs (compute capability 9.0), in Gluon, which is part of Triton but no stable
interface: ``meshattn_kernels.rules`` says with which versions they are known to compile."""

from __future__ import annotations

from meshattn_kernels.contract import AttentionKernel


def hopper_kernel() -> AttentionKernel:
    """The kernel object."""
    from meshattn_kernels.hopper.kernel import HopperKernel

    return HopperKernel()
