"""Which kernel serves what, and which one runs where none is named: pure functions of a request.

    CPU, and float64 on any device                                                   reference
    CUDA, compute capability 9.0, bfloat16 and float16, triton 3.6, 3.7 or 3.9,
        head sizes that are multiples of 16 up to 128, no softcap, no dropout        hopper
    CUDA, any other compute capability from 8.0 on, type (float32 too), head size
        up to 256 and version of triton                                              triton
    anything else                                                                    an error

A kernel that is named is taken or refused, by the same rules. ``reference`` serves everything, and is never
chosen in place of a fast kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

import torch

Capability = tuple[int, int]

HOPPER_CAPABILITY = (9, 0)
HOPPER_HEAD_DIM_STEP, HOPPER_MAX_HEAD_DIM = 16, 128
HOPPER_TRITONS = ((3, 6), (3, 7), (3, 9))
"""Gluon is not stable: the versions whose code was looked at. With 3.8 some variants spill much."""
LEAST_CAPABILITY = (8, 0)
MAX_HEAD_DIM = 256
FLASH_HEAD_DIM_STEP = 8
PEER_MAX_HEAD_DIM = 128
"""Of cuDNN and of FlashAttention-4."""
OLDEST_CUDNN = 90000

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Platform:
    """Where a kernel is to run.

    device          type of the device: "cpu", "cuda", ...
    capability      compute capability of a GPU, else None.
    triton          (major, minor) of triton, None where it is not installed.
    interpreted     whether Triton's interpreter runs its kernels (TRITON_INTERPRET=1), on any device.
    cudnn           whether PyTorch has a cuDNN from 9.0 on.
    fa4             whether flash-attn-4 is installed.
    """

    device: str
    capability: Capability | None = None
    triton: tuple[int, int] | None = None
    interpreted: bool = False
    cudnn: bool = False
    fa4: bool = False

    @staticmethod
    @lru_cache(maxsize=64)
    def of(device: torch.device) -> Platform:
        """The facts of this process and this device. On the CPU triton is looked at only if interpreted."""
        on_gpu = device.type == "cuda"
        if on_gpu and not torch.cuda.is_available():
            raise ValueError(f"device is {device}, but there is no CUDA device here: ask on the GPU machine")
        version, interpreted = None, False
        if on_gpu or "TRITON_INTERPRET" in os.environ:
            version, interpreted = _triton()
        capability = torch.cuda.get_device_capability(device) if on_gpu else None
        installed = {"cudnn": _has_cudnn(), "fa4": _has_fa4()} if on_gpu else {}
        return Platform(device.type, capability, version, interpreted, **installed)


@dataclass(frozen=True)
class Request:
    """What a kernel is asked for: where, the type and head sizes (of q and k; of v) of the inputs, and
    whether the mask of every block is a band without a left edge (full or causal), whether scores are bounded
    by a softcap, and whether there is dropout."""

    platform: Platform
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    plain_mask: bool = True
    softcap: bool = False
    dropout: bool = False

    @property
    def place(self) -> str:
        """The device in words."""
        capability = self.platform.capability
        of = "" if capability is None else f" with compute capability {_dotted(capability)}"
        return self.platform.device + of


Refusal = str | None
"""Why a kernel does not serve a request: "the tensor and its size; the kernel and its rule"."""


def reference_refusal(request: Request) -> Refusal:
    """Serves everything."""
    return None


def hopper_refusal(request: Request) -> Refusal:
    platform = request.platform
    if platform.device != "cuda" or platform.capability != HOPPER_CAPABILITY or platform.interpreted:
        interpreted = ", interpreted" if platform.interpreted else ""
        return f"q is on {request.place}{interpreted}; kernel 'hopper' runs on compute capability 9.0 alone"
    if platform.triton is None:
        return "triton is not installed; kernel 'hopper' needs it"
    if platform.triton not in HOPPER_TRITONS:
        known = ", ".join(map(_dotted, HOPPER_TRITONS))
        return (
            f"triton is {_dotted(platform.triton)}; kernel 'hopper' is known to compile with one of {known}"
        )
    if request.dtype not in _HALF:
        return f"q is {request.dtype}; kernel 'hopper' takes bfloat16 and float16"
    return _head_dims("hopper", request, HOPPER_HEAD_DIM_STEP, HOPPER_MAX_HEAD_DIM)


def triton_refusal(name: str) -> Callable[[Request], Refusal]:
    """The rule of the portable kernels, which differ by name."""

    def refusal(request: Request) -> Refusal:
        platform = request.platform
        if not platform.interpreted:
            if platform.device != "cuda":
                return (
                    f"q is on {request.place}; kernel {name!r} runs on CUDA devices, or anywhere in Triton's "
                    "interpreter, slowly, if TRITON_INTERPRET=1 is set before triton is imported"
                )
            if platform.triton is None:
                return f"triton is not installed; kernel {name!r} needs it"
            if platform.capability is None or platform.capability < LEAST_CAPABILITY:
                return f"q is on {request.place}; kernel {name!r} needs {_dotted(LEAST_CAPABILITY)}"
        if request.dtype not in (*_HALF, torch.float32):
            return f"q is {request.dtype}; kernel {name!r} takes float16, bfloat16 and float32"
        return _head_dims(name, request, 1, MAX_HEAD_DIM)

    return refusal


def sdpa_refusal(request: Request) -> Refusal:
    platform = request.platform
    if platform.device == "cuda":
        if platform.capability is None or platform.capability < LEAST_CAPABILITY:
            return f"q is on {request.place}; kernel 'sdpa' needs {_dotted(LEAST_CAPABILITY)}"
        if request.dtype not in _HALF:
            return f"q is {request.dtype}; kernel 'sdpa' takes bfloat16 and float16 on a GPU"
        refused = _head_dims("sdpa", request, FLASH_HEAD_DIM_STEP, MAX_HEAD_DIM)
        if refused is not None:
            return refused
    elif platform.device != "cpu":
        return f"q is on {request.place}; kernel 'sdpa' runs on CUDA devices and the CPU"
    if request.head_dim != request.head_dim_v:
        return (
            f"q and k have head size {request.head_dim} and v {request.head_dim_v}; kernel 'sdpa' takes "
            "equal ones"
        )
    return _plain_masks("sdpa", request)


def cudnn_refusal(request: Request) -> Refusal:
    return _peer_refusal("cudnn", "cuDNN 9", request.platform.cudnn, request)


def fa4_refusal(request: Request) -> Refusal:
    return _peer_refusal("fa4", "flash-attn-4", request.platform.fa4, request)


def _plain_scores(name: str, rule: Callable[[Request], Refusal]) -> Callable[[Request], Refusal]:
    """The rule of a kernel that has neither softcap nor dropout."""

    def refusal(request: Request) -> Refusal:
        refused = rule(request)
        if refused is None and request.softcap:
            return f"softcap is not 0; kernel {name!r} has none"
        if refused is None and request.dropout:
            return f"dropout_p is not 0; kernel {name!r} has no dropout"
        return refused

    return refusal


RULES: dict[str, Callable[[Request], Refusal]] = {
    "reference": reference_refusal,
    "hopper": _plain_scores("hopper", hopper_refusal),
    "triton": triton_refusal("triton"),
    "triton-dash": triton_refusal("triton-dash"),
    "sdpa": _plain_scores("sdpa", sdpa_refusal),
    "cudnn": _plain_scores("cudnn", cudnn_refusal),
    "fa4": _plain_scores("fa4", fa4_refusal),
}
"""By the name of the kernel: why it does not serve a request, None if it does."""

WITHOUT_LSE_GRADIENT = ("sdpa", "cudnn")
"""Kernels whose backward makes delta of do and out itself, and so has no place for the gradient of lse."""

REPEATABLE = ("hopper", "triton", "triton-dash")
"""Kernels of which calls with the same memory enqueue the same, so that a CUDA graph can stand for them."""

ON_CUDA = ("hopper", "triton")
"""Where no kernel is named, the first of these that serves the request runs on a GPU."""


@lru_cache(maxsize=256)
def choose(name: str | None, request: Request) -> str:
    """The kernel that runs: the one named if it serves the request, by the rule of this module for None.

    Raises ValueError, naming tensor, size or type or device, rule, and the kernels that serve the request.
    """
    if name is not None and name not in RULES:
        raise ValueError(
            f"kernel is {name!r}; choose one of {', '.join(RULES)}, or None for the fastest that serves"
        )
    if name is None:
        exact = request.dtype == torch.float64
        names = ("reference",) if exact or request.platform.device == "cpu" else ON_CUDA
    else:
        names = (name,)
    refusals = [RULES[candidate](request) for candidate in names]
    if None in refusals:
        return names[refusals.index(None)]
    # The last candidate serves most: what it refuses is what there is to say.
    raise ValueError(f"{refusals[-1]}. {_way_out(request)}")


@lru_cache(maxsize=64)
def runs_triton(device: torch.device, accumulator_dtype: torch.dtype) -> bool:
    """Whether passes over accumulators of this type run in Triton rather than in PyTorch operations: float32
    on a GPU."""
    platform = Platform.of(device)
    return (
        device.type == "cuda"
        and accumulator_dtype == torch.float32
        and platform.triton is not None
        and platform.capability is not None
        and platform.capability >= LEAST_CAPABILITY
    )


def _way_out(request: Request) -> str:
    serving = [f"kernel={name!r}" for name in (*ON_CUDA, "reference") if RULES[name](request) is None]
    return f"Choose {' or '.join(serving)}" + (" (which is slow)" if len(serving) == 1 else "")


def _peer_refusal(name: str, package: str, installed: bool, request: Request) -> Refusal:
    capability = request.platform.capability
    if request.platform.device != "cuda" or capability is None or capability[0] not in (9, 10):
        return f"q is on {request.place}; kernel {name!r} runs on compute capability 9.x and 10.x"
    if not installed:
        return f"{package} is not installed; kernel {name!r} needs it"
    if request.dtype not in _HALF:
        return f"q is {request.dtype}; kernel {name!r} takes bfloat16 and float16"
    refused = _head_dims(name, request, FLASH_HEAD_DIM_STEP, PEER_MAX_HEAD_DIM)
    return refused or _plain_masks(name, request)


def _head_dims(name: str, request: Request, step: int, largest: int) -> Refusal:
    for tensors, dim in (("q and k", request.head_dim), ("v", request.head_dim_v)):
        if dim % step or not step <= dim <= largest:
            of = f"multiples of {step} up to {largest}" if step > 1 else f"1 to {largest}"
            return f"{tensors} have head size {dim}; kernel {name!r} takes {of}"
    return None


def _plain_masks(name: str, request: Request) -> Refusal:
    if request.plain_mask:
        return None
    return (
        f"layout and mask give rows intervals of their own; kernel {name!r} takes no mask and causal, in "
        "striped and contiguous layouts"
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@lru_cache(maxsize=1)
def _triton() -> tuple[tuple[int, int] | None, bool]:
    """Version of triton, and whether its interpreter is on."""
    try:
        import triton
    except ImportError:
        return None, False
    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return (major, minor), bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=1)
def _has_cudnn() -> bool:
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version is not None and version >= OLDEST_CUDNN


@lru_cache(maxsize=1)
def _has_fa4() -> bool:
    try:
        metadata.version("flash-attn-4")
    except metadata.PackageNotFoundError:
        return False
    return True
