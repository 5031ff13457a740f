"""Attention kernels on local tensors. Knows no ranks and never imports meshattn."""
