"""A kernel that leaves multiprocessors to others, or computes a part of the heads, where it knows how to."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch

from meshattn_kernels import device as gpu
from meshattn_kernels.contract import AttentionKernel


def leave_room(kernel: AttentionKernel, device: torch.device, multiprocessors: int) -> AttentionKernel:
    """The kernel on that many multiprocessors of ``device`` less, with the same bits.

    Kernels without a field ``workers`` share the device as the hardware lets them, and come back as they are.
    """
    return kernel if multiprocessors == 0 else _limited(kernel, device, 1, multiprocessors)


def delay_some(
    kernel: AttentionKernel, device: torch.device, multiprocessors: int, units: int
) -> AttentionKernel:
    """The kernel with less to do in its forward for the last of its workers, one for each of so many
    multiprocessors, with the same bits: others hold these multiprocessors when it starts, for so many 64ths
    of the time that it takes on all.

    It wants them in the end, so it does not end before the others do. In a backward, whose workers wait for
    each other, those that come late hold up all. Kernels without a field ``delay`` come back as they are.
    """
    if not multiprocessors or not units or device.type != "cuda" or not hasattr(kernel, "delay"):
        return kernel
    return _changed(kernel, delay=(multiprocessors, units))


def patient(kernel: AttentionKernel, seconds: float) -> AttentionKernel:
    """The kernel whose workers wait so long for each other before they give up, with the same bits: some of
    them begin only when an exchange with another rank, which may come late, has given back its
    multiprocessors. Kernels without a field ``patience`` come back as they are."""
    if not hasattr(kernel, "patience"):
        return kernel
    return _changed(kernel, patience=seconds)


def among(
    kernel: AttentionKernel, device: torch.device, ranks: int, multiprocessors: int = 0
) -> AttentionKernel:
    """The kernel on one of so many equal parts of the multiprocessors of ``device``, less those that a rank's
    exchanges take; with the same bits.

    A kernel whose blocks wait for each other needs them all at once, and where ranks share a GPU, an exchange
    that waits for this rank may hold what it needs, also while this rank exchanges nothing.
    """
    return kernel if ranks == 1 else _limited(kernel, device, ranks, multiprocessors)


def _limited(kernel: AttentionKernel, device: torch.device, parts: int, taken: int) -> AttentionKernel:
    """On one of so many equal parts of the multiprocessors, less those that are taken."""
    if device.type != "cuda" or not hasattr(kernel, "workers"):
        return kernel
    workers = max(1, (kernel.workers or gpu.multiprocessors(device)) // parts - taken)
    return _changed(kernel, workers=workers)


def takes_parts(kernel: AttentionKernel) -> bool:
    """Whether ``of_part`` can cut its work."""
    return hasattr(kernel, "part")


def of_part(kernel: AttentionKernel, part: int, parts: int) -> AttentionKernel:
    """The kernel on the part-th of ``parts`` runs of key/value heads with their query heads: it leaves alone
    what belongs to others, also where it writes an accumulator for the first time. The parts of a block, one
    after the other, are the block."""
    if parts == 1:
        return kernel
    return _changed(kernel, part=(part, parts))


def _changed(kernel: AttentionKernel, **fields: Any) -> AttentionKernel:
    """Kernels are frozen dataclasses, each with fields of its own."""
    return cast(AttentionKernel, dataclasses.replace(cast(Any, kernel), **fields))


def heads_of(kv_heads: int, part: tuple[int, int]) -> range:
    """The key/value heads of a part."""
    return range(kv_heads * part[0] // part[1], kv_heads * (part[0] + 1) // part[1])
