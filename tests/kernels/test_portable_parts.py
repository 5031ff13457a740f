"""Device functions of the portable kernels one by one, and what is decided before a launch.

Where they run: see test_portable.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

triton = pytest.importorskip("triton")
if not triton.knobs.runtime.interpret and not torch.cuda.is_available():
    pytest.skip("interpreted in a process of its own", allow_module_level=True)

import triton.language as tl  # noqa: E402

from meshattn_kernels import BandIntervals, Intervals  # noqa: E402
from meshattn_kernels.portable.kernel import group_parts  # noqa: E402
from meshattn_kernels.portable.launch import INTERPRETED, padded_dims, tiling  # noqa: E402
from meshattn_kernels.portable.scores import tanh  # noqa: E402
from meshattn_kernels.portable.tiles import TERM_ROWS, count_at_most, sees_all, tile_keys, tile_rows  # noqa: E402
from portable_runs import DEVICE, visible_pairs  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("size", [1, 127, 129, 128**2 + 1, 50000])
def test_search_in_bounds_of_any_length(size: int) -> None:
    """Lengths below and above one, two and three levels of a search by 128."""
    generator = torch.Generator().manual_seed(size)
    bound = torch.randint(0, size, (size,), generator=generator).sort().values.int().to(DEVICE)
    for limit in (-1, 0, size // 3, int(bound[size // 2]), size):
        count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        count_kernel[(1,)](bound, count, size, limit)
        assert int(count) == int((bound <= limit).sum()), limit


@triton.jit
def count_kernel(bound_ptr, count_ptr, size, limit):
    tl.store(count_ptr, count_at_most(bound_ptr, size, limit))


@pytest.mark.parametrize("form", ["band", "arrays"])
@pytest.mark.parametrize("width", [0, 3, 29, 30, 31])
def test_tiles_are_walked_and_masked_exactly_where_needed(form: str, width: int) -> None:
    """A band moves over a tile of 16 x 16, with more rows and keys beyond: the tile is walked, by rows and by
    keys, if any pair of it is visible, and unmasked if all are."""
    rows, keys, tile = 19, 18, 16
    for lo in range(-20, 20):
        intervals: Intervals = BandIntervals(lo, lo + width, rows, keys)
        start, end = (bound.to(DEVICE) for bound in intervals.bounds(rows))
        found = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        pair_kernel[(1,)](found, start, end, lo, lo + width, rows, keys, tile, form == "band")
        pairs = visible_pairs(rows, keys, [(slice(None), intervals)])[:tile, :tile]
        assert found.tolist() == [pairs.any(), pairs.all(), pairs.any(), pairs.all(), pairs.all()], lo


@triton.jit
def pair_kernel(found_ptr, start_ptr, end_ptr, lo, hi, n_q, n_k, TILE: tl.constexpr, BAND: tl.constexpr):
    r0 = tl.program_id(0) * TILE
    t0 = tl.program_id(0) * TILE
    bounds = start_ptr, end_ptr, lo, hi, n_q, n_k
    first, full, full_end, end = tile_keys(r0, bounds, TILE, TILE, BAND)
    tl.store(found_ptr, ((first <= 0) & (end > 0)).to(tl.int32))
    tl.store(found_ptr + 1, ((full <= 0) & (full_end > 0)).to(tl.int32))
    first, full, full_end, end = tile_rows(t0, bounds, TILE, TILE, BAND)
    tl.store(found_ptr + 2, ((first <= 0) & (end > 0)).to(tl.int32))
    tl.store(found_ptr + 3, ((full <= 0) & (full_end > 0)).to(tl.int32))
    whole = sees_all(r0, t0, bounds, TILE, TILE, BAND)
    tl.store(found_ptr + 4, whole.to(tl.int32))


@triton.jit
def tanh_kernel(x_ptr, y_ptr):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    tl.store(y_ptr + at, tanh(tl.load(x_ptr + at)))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_the_tanh_is_right_to_a_few_bits_of_its_value() -> None:
    """Near 0, where a large softcap multiplies it, and where the square or the exponential is no float32."""
    x = torch.cat([torch.zeros(1), torch.logspace(-30, 38, 4095), torch.linspace(0.3, 20.0, 4096)])
    x = torch.cat([x, -x]).to(DEVICE)
    y = torch.full_like(x, math.nan)
    tanh_kernel[(len(x) // 1024,)](x, y)
    exact = x.double().tanh()
    assert ((y - exact).abs() <= 8e-7 * exact.abs()).all() and (y.abs() <= 1).all()


def test_two_loop_backward_splits_a_group_when_programs_are_few() -> None:
    assert group_parts(8, 1) == 8 and group_parts(8, 64) == 2 and group_parts(8, 128) == 1
    assert group_parts(6, 50) == 3 and group_parts(1, 1) == 1
    assert all(8 % group_parts(8, tasks) == 0 for tasks in range(1, 200))


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0), (12, 0)])
def test_tiles_hold_a_head_and_lie_on_hopper_in_one_pattern(capability: tuple[int, int] | None) -> None:
    """Rows of 128 bytes or more lie in one pattern of shared memory, and each shorter row in its own."""
    for dim, dim_v in itertools.product((*range(1, 67), 128, 129, 256), repeat=2):
        widths = padded_dims(dim, dim_v, capability)
        for width, least in zip(widths, (dim, dim_v), strict=True):
            assert width >= max(least, 16) and width & (width - 1) == 0
        assert min(widths) >= 64 or widths[0] == widths[1] or capability != (9, 0)


def test_tilings_exist_for_all_sizes_types_and_gpus() -> None:
    for which in ("forward", "dkdv", "dq", "dash"):
        for capability in (None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                for dim, dim_v in itertools.product((1, 16, 17, 33, 64, 65, 128, 129, 256), repeat=2):
                    widths = padded_dims(dim, dim_v, capability)
                    for dropout in (False, True):
                        tiles = tiling(which, widths, dtype, capability, dropout)
                        assert min(tiles.q_tile, tiles.kv_tile) >= 16 and TERM_ROWS.value % tiles.q_tile == 0
