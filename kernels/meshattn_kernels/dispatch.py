"""Kernels by name. A name is honoured or refused, never replaced by another kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshattn_kernels.contract import AttentionKernel
from meshattn_kernels.reference import ReferenceKernel
from meshattn_kernels.rules import Platform, Request, choose


def _hopper() -> AttentionKernel:
    from meshattn_kernels.hopper import hopper_kernel  # imports triton, and only when asked for

    return hopper_kernel()


def _triton(softcap: float = 0.0) -> AttentionKernel:
    from meshattn_kernels.portable.kernel import TritonKernel

    return TritonKernel(softcap=softcap)


def _triton_dash(softcap: float = 0.0) -> AttentionKernel:
    from meshattn_kernels.portable.kernel import TritonDashKernel

    return TritonDashKernel(softcap=softcap)


def _reference(softcap: float = 0.0) -> AttentionKernel:
    return ReferenceKernel(softcap=softcap)


def _sdpa() -> AttentionKernel:
    from meshattn_kernels.sdpa import SdpaKernel

    return SdpaKernel()


def _cudnn() -> AttentionKernel:
    from meshattn_kernels.sdpa import CudnnKernel

    return CudnnKernel()


def _fa4() -> AttentionKernel:
    from meshattn_kernels.fa4 import Fa4Kernel

    return Fa4Kernel()


_KERNELS: dict[str, Callable[..., AttentionKernel]] = {
    "reference": _reference,
    "hopper": _hopper,
    "triton": _triton,
    "triton-dash": _triton_dash,
    "sdpa": _sdpa,
    "cudnn": _cudnn,
    "fa4": _fa4,
}


_WITH_SOFTCAP = ("reference", "triton", "triton-dash")


def kernel_names() -> tuple[str, ...]:
    """Names that ``get_kernel`` and ``choose_kernel`` take."""
    return tuple(_KERNELS)


def get_kernel(name: str, softcap: float = 0.0) -> AttentionKernel:
    """The kernel of that name, whatever it serves, with scores bounded by ``softcap`` (0: no bound).

    Raises ValueError for an unknown name, and for a softcap if the kernel has none.
    """
    if name not in _KERNELS:
        raise ValueError(f"kernel is {name!r}; choose one of {', '.join(_KERNELS)}")
    if not softcap:
        return _KERNELS[name]()
    if name not in _WITH_SOFTCAP:
        raise ValueError(f"softcap is {softcap}; kernel {name!r} has none")
    return _KERNELS[name](softcap)


def choose_kernel(
    name: str | None,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    *,
    plain_mask: bool = True,
    softcap: bool = False,
    dropout: bool = False,
) -> str:
    """Name of the kernel that runs on tensors of this device, type and head sizes (q and k; v).

    Args:
        name: a kernel that must be taken or refused; None chooses by the rule of ``meshattn_kernels.rules``.
        plain_mask: whether the mask of every block is full or causal, as a band.
        softcap, dropout: whether scores are bounded by a softcap, and probabilities dropped.

    Raises:
        ValueError: no kernel serves that, or the named one does not; the message says which would.
    """
    platform = Platform.of(device)
    return choose(name, Request(platform, dtype, head_dim, head_dim_v, plain_mask, softcap, dropout))


def check_call(kernel: str, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> None:
    """Raise ValueError for what our kernels in Triton do not serve: device, type, head size, sign of the
    scale."""
    choose_kernel(kernel, q.device, q.dtype, q.shape[-1], v.shape[-1])
    if not softmax_scale > 0:
        raise ValueError(
            f"softmax_scale is {softmax_scale}; kernel {kernel!r} takes positive ones. Negate q, or choose "
            "kernel='reference'"
        )
    assert q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    assert q.shape[2] % k.shape[2] == 0 and k.shape[:3] == v.shape[:3] and q.shape[-1] == k.shape[-1]
