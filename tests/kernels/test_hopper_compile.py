"""A covering set of the Hopper kernels compiles for sm_90 without spills or serialised products; no GPU
needed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshattn_kernels.rules import HOPPER_TRITONS

triton = pytest.importorskip("triton")
version = tuple(int(part) for part in triton.__version__.split(".")[:2])
if version not in HOPPER_TRITONS:
    pytest.skip(f"not for triton {triton.__version__}", allow_module_level=True)


def _load(name: str) -> ModuleType:
    """A script beside this file, which no import path leads to."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_load("machine_code")  # which the other one imports
compile_hopper = _load("compile_hopper")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not the user's cache, and one for all variants."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("variant", list(compile_hopper.covering_set()), ids=str)
def test_compiles(variant: Any) -> None:
    assert not compile_hopper.compile_variant(variant).failures()


@pytest.mark.slow
@pytest.mark.parametrize("variant", list(compile_hopper.all_variants()), ids=str)
def test_every_variant_compiles(variant: Any) -> None:
    assert not compile_hopper.compile_variant(variant).failures()


@pytest.mark.parametrize("segment", [32, 16])
def test_dq_lies_in_shared_memory_as_finish_reads_it(segment: int) -> None:
    """The layout of 64 rows by 64 columns is a bijection; undoing TMA's swizzle gives rows in order, with
    columns permuted in segments."""
    from meshattn_kernels.hopper.ordered_add import column_order, dq_shared_layout

    bases = dq_shared_layout(segment).offset_bases
    order = column_order(segment)
    mask = 7 if segment == 32 else 3
    seen = set()
    for offset in range(64 * 64):
        row = column = 0
        for bit, (r, c) in enumerate(bases):
            if offset >> bit & 1:
                row, column = row ^ r, column ^ c
        plain = offset ^ ((offset >> 5 & mask) << 2)
        place = sum((column >> bit & 1) << i for i, bit in enumerate(order))
        assert plain == row * 64 + place
        assert place // segment == column // segment
        seen.add((row, column))
    assert len(seen) == 64 * 64
