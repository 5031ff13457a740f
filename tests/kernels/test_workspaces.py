"""What the planner's table says that the Hopper kernel keeps for itself, against the plans of that kernel."""

from __future__ import annotations

import pytest
import torch

from meshattn.plan.kernel_times import BlockTime
from meshattn.plan.topology import kernel_times
from meshattn_kernels import UNBOUNDED, BandIntervals

plans = pytest.importorskip("meshattn_kernels.hopper.plans", exc_type=ImportError)


class NoGpu:
    """torch, whose devices are all the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")


BLOCKS = [block for block in kernel_times("h200").blocks if block.rows in (256, 4096)]


@pytest.mark.parametrize(
    "block",
    BLOCKS[::3],
    ids=lambda b: f"S{b.rows}-H{b.heads}-H_kv{b.kv_heads}-D{b.head_dim}-{'causal' if b.causal else 'full'}",
)
def test_the_table_has_what_the_backward_plans(block: BlockTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "torch", NoGpu())
    rows, dim = block.rows, block.head_dim
    band = BandIntervals(0 if block.causal else -UNBOUNDED, UNBOUNDED, rows, rows)
    call = plans.Call(0, 132, 1, block.heads, block.kv_heads, rows, rows, dim, dim, True, None)
    assert block.workspace == 4 * plans.backward_plan(band, call).scratch_size > 0
