"""How the portable kernels are launched, with stand-ins for kernels: on any machine with triton."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from meshattn_kernels.portable import variants
from meshattn_kernels.portable.launch import strides


class _StandIn:
    """A jitted kernel, and a compiled one: notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []

    def warmup(
        self, *args: object, grid: object, num_warps: int, enable_fp_fusion: bool = False
    ) -> dict[object, object]:
        assert enable_fp_fusion, "bits rest on it"
        self.calls.append(("compile", args))
        return {grid: lambda *args: self.calls.append(("direct", args))}

    def __getitem__(self, grid: object):
        def launch(*args: object, num_warps: int, enable_fp_fusion: bool = False) -> None:
            assert enable_fp_fusion, "bits rest on it"
            self.calls.append(("ordinary", args))

        return launch


def test_a_launch_goes_straight_to_its_variant_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "INTERPRETED", False)
    kernel, grid, x = _StandIn(), (1, 1, 1), torch.zeros(16)
    launch = variants.Launcher(kernel)

    def kinds(x: Tensor, number: float, constant: int) -> list[str]:
        kernel.calls.clear()
        launch(grid, (x,), (number,), (constant,), warps=4)
        return [kind for kind, _ in kernel.calls]

    assert kinds(x, 7, 1) == ["compile", "direct"]
    assert kernel.calls[-1] == ("direct", (x.data_ptr(), 7, 1))
    assert kinds(x, 8, 1) == ["direct"]
    assert kinds(x, 7, 2) == ["compile", "direct"]
    assert kinds(x.int(), 7, 1) == ["compile", "direct"]
    # A scale or softcap may be a whole number: its bits are no fraction's.
    assert kinds(x, 7.0, 1) == ["compile", "direct"] and kinds(x, 0.5, 1) == ["direct"]
    assert kinds(x[1:], 7, 1) == kinds(x, 2**31, 1) == ["ordinary"]


@pytest.mark.parametrize("heads", [1, 3])
def test_strides_come_in_units_of_16_bytes_for_every_head_size(heads: int) -> None:
    for head_dim in range(8, 257, 8):
        q, k = (torch.empty(2, 5, heads, head_dim) for _ in range(2))
        assert strides(q, k) == (8, [5 * heads * head_dim // 8, head_dim // 8] * 2)
        odd = torch.empty(2, 5, heads, head_dim + 1)[..., :-1]
        assert strides(q, odd) == (1, [*q.stride()[0:3:2], *odd.stride()[0:3:2]])
