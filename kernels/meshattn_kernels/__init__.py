"""Attention kernels of meshattn, on local tensors: no ranks, no groups, no transfers."""

from meshattn_kernels.contract import AccumulatorKind, AttentionKernel, accumulator_dtype
from meshattn_kernels.dispatch import choose_kernel, get_kernel, kernel_names
from meshattn_kernels.intervals import UNBOUNDED, ArrayIntervals, BandIntervals, Intervals

__all__ = [
    "UNBOUNDED",
    "AccumulatorKind",
    "ArrayIntervals",
    "AttentionKernel",
    "BandIntervals",
    "Intervals",
    "accumulator_dtype",
    "choose_kernel",
    "get_kernel",
    "kernel_names",
]
