"""Attention kernels in plain Triton, for any GPU that Triton compiles for, and for its interpreter on the
CPU.

Nothing here is imported before such a kernel is asked for by name: ``import meshattn_kernels`` needs no
triton.
"""
