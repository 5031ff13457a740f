"""Launches that are made once and kept: numbers, under the addresses and sizes that they were made from.

An ordinary Triton launch inspects and specialises every argument, and encodes every descriptor anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any, Generic, TypeVar

import triton
from torch import Tensor

MAX_KEPT = 1024
FUSED = {"enable_fp_fusion": True}
"""An option of compilation: products and sums in one instruction. Bits and speed rest on it, and triton 3.9
says that 3.10 will no longer do it by itself."""
Launch = Callable[[], None]
T = TypeVar("T")


class Kept(Generic[T]):
    """What was made before, by what it was made from; emptied when there is too much."""

    def __init__(self) -> None:
        self._known: dict[Hashable, T] = {}

    def get(self, key: Hashable) -> T | None:
        return self._known.get(key)

    def put(self, key: Hashable, made: T) -> T:
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        self._known[key] = made
        return made


def bound(compiled: Any, device: int, grid: int, args: Sequence[Any], constants: tuple[Any, ...]) -> Launch:
    """A function that launches ``grid`` programs of a compiled kernel on the current stream of ``device``,
    the current device. ``constants`` stand behind all other arguments in the signature."""
    numbers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    ordinary = compiled[(grid, 1, 1)]

    def plain() -> None:
        ordinary(*numbers, *constants)

    runtime: Any = triton.knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    direct = _direct_launcher(compiled)
    if direct is None or not all(hasattr(hook, "calls") for hook in hooks):
        return plain
    before, after = hooks
    rest = _in_order(compiled, (*_flattened(compiled, args), *constants))
    current_stream: Any = triton.runtime.driver.active.get_current_stream

    def fast() -> None:
        if before.calls or after.calls:  # a profiler looks on
            plain()
        else:
            direct(grid, 1, 1, current_stream(device), *rest)

    return fast


def _direct_launcher(compiled: Any) -> Any:
    """What launches a compiled kernel, a C function. Triton keeps it behind a wrapper that encodes all
    descriptors on every launch; None where it cannot be found, or takes more than we give it."""
    try:
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
            return None
        if not hasattr(run, "launch_pdl"):  # AMD's, with arguments in another order
            return None
        launch = run.launch
        if isinstance(launch, FunctionType):
            cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
            launch = cells["launcher"].cell_contents
        return None if isinstance(launch, FunctionType) else launch
    except (AttributeError, KeyError):
        return None


def _in_order(compiled: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the C function takes behind grid and stream: no metadata of the launch, no hooks, no scratch."""
    run = compiled.run
    front = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    hooks = (compiled.packed_metadata, None, None, None)
    if hasattr(run, "kernel_signature"):  # from triton 3.7 on, one function for all kernels
        return (*front, *hooks, None, None, run.arg_annotations, run.kernel_signature, args)
    return (*front, None, None, *hooks, *args)


def _flattened(compiled: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments as the C function takes them: addresses, numbers, encoded descriptors with shape and
    strides."""
    metadata = iter(compiled.metadata.tensordesc_meta or ())
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, Tensor):
            flat.append(arg.data_ptr())
        elif isinstance(arg, (int, float)):
            flat.append(arg)
        else:
            flat += _descriptor_encoder()(arg, next(metadata))
    return flat


@cache
def _descriptor_encoder() -> Callable[[Any, Any], list[Any]]:
    """A function of a descriptor and its metadata."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # From triton 3.8 on it is told of the launch, too, of which it needs nothing.
    told = (None,) * (len(signature(make_tensordesc_arg).parameters) - 2)
    return lambda descriptor, metadata: make_tensordesc_arg(descriptor, metadata, *told)
