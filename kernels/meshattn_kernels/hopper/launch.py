"""Launching with little host time: variants, TMA descriptors and their encodings are made once and kept.

An ordinary Triton launch inspects and specialises every argument and encodes every descriptor anew: about 0.3 ms
for a kernel with six of them. Here a kernel's variant depends on its constants and on the input type alone (no
integer is specialised, all specialised pointers are multiples of 16), so a compiled variant found by these can be
launched directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MAX_DESCRIPTORS = 4096
_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@dataclass(frozen=True)
class _Address:
    """What a descriptor needs of a tensor. Not the tensor itself: a kept descriptor must not keep its memory."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


@dataclass(frozen=True, eq=False)
class Descriptor:
    """A TMA descriptor of an address, with what the launchers of compiled variants made of it."""

    tensor_descriptor: TensorDescriptor
    expanded: dict[Any, list[Any]] = field(default_factory=dict)


_descriptors: dict[tuple[Any, ...], Descriptor] = {}


def descriptor(
    tensor: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> Descriptor:
    """A descriptor for blocks of the memory of ``tensor`` seen with this shape and these strides (in elements)."""
    key = (tensor.data_ptr(), tensor.dtype, *shape, *strides, *block)
    found = _descriptors.get(key)
    if found is None:
        if len(_descriptors) >= MAX_DESCRIPTORS:
            _descriptors.clear()
        layout = gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[tensor.dtype])
        address = _Address(tensor.data_ptr(), tensor.dtype)
        found = Descriptor(TensorDescriptor(address, list(shape), list(strides), list(block), layout))
        _descriptors[key] = found
    return found


def tiles_of(x: Tensor, num_rows: int, rows: int, columns: int) -> Descriptor:
    """Descriptor of x [B, S, H, D] as [B, H, S, D] cut off after ``num_rows`` rows: what lies beyond these rows or
    beyond D is read as zero. x must be ``tma_ready``."""
    batch, _, heads, head_dim = x.shape
    row, head = x.stride(1), x.stride(2)
    # The stride of a dim of one element means nothing to torch but must be valid here.
    strides = (
        x.stride(0) if batch > 1 else head_dim,
        head if heads > 1 else head_dim,
        row if x.shape[1] > 1 else head_dim,
        1,
    )
    return descriptor(x, (batch, heads, num_rows, head_dim), strides, (1, 1, rows, columns))


def tma_ready(x: Tensor) -> Tensor:
    """x [B, S, H, D], or a copy if TMA cannot read it: it needs a contiguous last dim, and a base and other strides
    that are multiples of 16 bytes and not 0."""
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0:
        step = 16 // x.element_size()
        if all(
            size == 1 or (stride > 0 and stride % step == 0) for size, stride in zip(x.shape, x.stride()[:3])
        ):  # noqa: B905
            return x
    return x.clone(memory_format=torch.contiguous_format)


class Kernel:
    """A jitted kernel whose compiled variants are launched directly after their first use."""

    def __init__(self, function: Any, *, num_warps: int, cooperative: bool = False) -> None:
        self._function = function
        self._options = {"num_warps": num_warps, "launch_cooperative_grid": cooperative}
        self._variants: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(
        self, device: int, grid: int, args: Sequence[Any], constants: dict[str, Any], *key: Any
    ) -> None:
        """Launch ``grid`` programs on the current stream of the current device, which is ``device``.

        ``key`` are the types of tensor arguments that vary. ``constants`` in the order of the signature.
        """
        variant_key = (device, *key, *constants.values())
        variant = self._variants.get(variant_key)
        if variant is None:
            plain = [a.tensor_descriptor if isinstance(a, Descriptor) else a for a in args]
            compiled = self._function[(grid,)](*plain, **constants, **self._options)
            self._variants[variant_key] = _launcher(compiled, tuple(constants.values()))
            return
        variant(device, grid, args)


def _launcher(compiled: Any, constants: tuple[Any, ...]) -> Callable[[int, int, Sequence[Any]], None]:
    runtime: Any = triton.knobs.runtime
    driver: Any = triton.runtime.driver.active
    direct, encode, metadata = _direct_launch(compiled)

    def plain(device: int, grid: int, args: Sequence[Any]) -> None:
        unpacked = [a.tensor_descriptor if isinstance(a, Descriptor) else a for a in args]
        compiled[(grid, 1, 1)](*unpacked, *constants)

    if direct is None:
        return plain
    cooperative, dependent = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl
    function, packed = compiled.function, compiled.packed_metadata

    def fast(device: int, grid: int, args: Sequence[Any]) -> None:
        if (
            runtime.launch_enter_hook is not None or runtime.launch_exit_hook is not None
        ):  # a profiler looks on
            return plain(device, grid, args)
        flat: list[Any] = []
        number = 0
        for arg in args:
            if isinstance(arg, Descriptor):
                expanded = arg.expanded.get(compiled)
                if expanded is None:
                    expanded = encode(arg.tensor_descriptor, metadata[number])
                    arg.expanded[compiled] = expanded
                flat += expanded
                number += 1
            else:
                flat.append(arg)
        stream = driver.get_current_stream(device)
        direct(
            grid,
            1,
            1,
            stream,
            function,
            cooperative,
            dependent,
            None,
            None,
            packed,
            None,
            None,
            None,
            *flat,
            *constants,
        )

    return fast


def _direct_launch(compiled: Any) -> tuple[Any, Any, Any]:
    """(C launcher, encoder of a descriptor, metadata of the descriptors) of a compiled kernel, which Triton 3.6
    keeps behind a wrapper that encodes descriptors on every launch. (None, None, None) where that is not so."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            return None, None, None
        metadata = compiled.metadata.tensordesc_meta
        if not metadata:
            return (
                (run.launch, None, ())
                if run.launch.__class__.__name__.startswith("builtin")
                else (None, None, None)
            )
        cells = dict(zip(run.launch.__code__.co_freevars, run.launch.__closure__, strict=True))
        return cells["launcher"].cell_contents, make_tensordesc_arg, metadata
    except (ImportError, AttributeError, KeyError):
        return None, None, None
