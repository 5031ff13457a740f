"""Launches that are kept send what Triton's own would, with stand-ins for the driver: on any machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
nvidia = pytest.importorskip("triton.backends.nvidia.driver")

from meshattn_kernels.bound import bound  # noqa: E402

ONE_FOR_ALL = hasattr(nvidia, "make_kernel_signature")
"""From triton 3.7 on one C function launches all kernels; before, each has its own."""


def _encoded(*args: object) -> object:
    return ("encoded", *map(str, args))


class _Driver:
    """What launches need of a driver; notes what its C function gets."""

    def __init__(self) -> None:
        self.sent: list[tuple[object, ...]] = []
        self.utils = SimpleNamespace(
            launch=self.launch,
            build_signature_metadata=lambda kinds: ("signature", *kinds),
            fill_tma_descriptor_tiled=_encoded,
            fill_tma_descriptor=_encoded,  # before triton 3.7
        )

    def launch(self, *args: object) -> None:
        self.sent.append(args)

    def get_current_stream(self, device: int) -> int:
        return 70 + device

    def get_current_device(self) -> int:
        return 1

    def allocate_default_profile_scratch(self, size: int, align: int, stream: int) -> None:
        assert size == 0


class _Argument:
    """How a constant or an argument is told to the C function."""

    def __init__(self, nested_tuple: object, type: object) -> None:
        self.told = nested_tuple, type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Argument) and self.told == other.told

    __hash__ = None  # type: ignore[assignment]


class _Compiled:
    """A compiled kernel whose signature holds a tensor, a number, maybe a descriptor, and a constant."""

    def __init__(self, descriptors: int) -> None:
        kinds = ["*fp32", "i32", *["tensordesc<bf16[1, 64]>"] * descriptors, "constexpr"]
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 64], "fp4_padded": False}
        self.metadata = SimpleNamespace(
            tensordesc_meta=[meta] * descriptors,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=True,
            launch_pdl=False,
        )
        self.function, self.packed_metadata = 4711, (4, 1, 1024)
        source = SimpleNamespace(signature=dict(enumerate(kinds)), constants={})
        self.run = nvidia.CudaLauncher(source, self.metadata)

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def run(*args: object) -> None:
            stream = triton.runtime.driver.active.get_current_stream(1)
            front = (*grid, stream, self.function, self.packed_metadata, None, None, None)
            self.run(*front, *args)

        return run


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    driver = _Driver()
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    if not ONE_FOR_ALL:
        monkeypatch.setattr(nvidia, "library_dirs", list)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: driver.utils)
        return driver
    monkeypatch.setattr(nvidia, "PyKernelArg", _Argument)
    for number, name in enumerate(("ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE")):
        monkeypatch.setattr(nvidia, name, number)
    return driver


def _descriptor(tensor: Tensor) -> Any:
    return SimpleNamespace(
        base=tensor,
        shape=[5, 64],
        strides=[64, 1],
        block_shape=[1, 64],
        padding="zero",
        round_f32_to_tf32=False,
    )


@pytest.mark.parametrize("descriptors", [0, 1, 3])
def test_a_kept_launch_sends_what_an_ordinary_one_sends(driver: _Driver, descriptors: int) -> None:
    compiled, tensor = _Compiled(descriptors), torch.zeros(5, 64)
    more = [_descriptor(tensor) for _ in range(descriptors)]
    bound(compiled, 1, 6, (tensor, 9, *more), (16,))()
    compiled[(6, 1, 1)](tensor.data_ptr(), 9, *more, 16)
    kept, ordinary = driver.sent
    assert [_plain(value) for value in kept] == [_plain(value) for value in ordinary]
    arguments = kept[-1] if ONE_FOR_ALL else kept[13:]
    assert arguments[-1] == 16 and len(arguments) == 3 + 5 * descriptors


@pytest.mark.parametrize(
    ("name", "value"),
    [("global_scratch_size", 8), ("profile_scratch_size", 8), ("gsan_enabled", True), ("launch_pdl", None)],
    ids=str,
)
def test_what_needs_more_than_a_kept_launch_has_is_left_to_triton(
    driver: _Driver, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    compiled, tensor = _Compiled(0), torch.zeros(5, 64)
    if value is None:
        delattr(compiled.run, name)
    else:
        setattr(compiled.run, name, value)
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        _Compiled, "__getitem__", lambda self, grid: lambda *args: given.append((grid, *args))
    )
    bound(compiled, 1, 6, (tensor, 9), (16,))()
    assert given == [((6, 1, 1), tensor.data_ptr(), 9, 16)] and not driver.sent


def _plain(value: Any) -> object:
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value


def test_products_and_sums_are_one_instruction_with_every_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshattn_kernels.hopper import launch

    told: list[dict[str, object]] = []
    kernel = SimpleNamespace(warmup=lambda *args, **options: told.append(options))
    monkeypatch.setattr(launch, "bound", lambda *args: None)
    launch.Kernel(kernel, num_warps=4).bind(0, 3, (), {})
    assert told[0]["enable_fp_fusion"] is True
