"""Clusters for the tests of planner and emulator: round numbers, kernels of one rate."""

from __future__ import annotations

from meshattn.plan.cost import CallShape
from meshattn.plan.kernel_times import BlockTime, KernelTimes
from meshattn.plan.topology import Link, Topology

RATE = 1e7


def _block(heads: int, rows: int, causal: bool) -> BlockTime:
    """RATE pairs * heads * head size a microsecond, half as many backward; half of a causal block is
    visible."""
    work = rows**2 * heads * 128 / RATE / (2 if causal else 1)
    return BlockTime(128, heads, heads, rows, causal, work, work, 2 * work, 2 * work)


FLAT = KernelTimes(
    "flat",
    tuple(
        _block(heads, rows, causal) for heads in (1, 64) for rows in (1, 2**20) for causal in (True, False)
    ),
)


def cluster(
    gpus_per_node: int = 4,
    *,
    inside: float = 100.0,
    between: float = 10.0,
    latency_us: float = 0.0,
    gpus_per_nic: int = 1,
    start_us: float = 0.0,
    sm_share: float = 0.0,
    memory_gb_per_s: float = 1e9,
    copy_engines: bool = False,
) -> Topology:
    """Merges and copies cost nothing by default."""
    return Topology(
        name="test",
        gpus_per_node=gpus_per_node,
        inside=Link(inside, latency_us, copy_engines=copy_engines),
        between=Link(between, latency_us, sm_share),
        kernels=FLAT,
        gpus_per_nic=gpus_per_nic,
        memory_gb_per_s=memory_gb_per_s,
        start_us=start_us,
    )


def call(rows: int, *, heads: int = 8, kv_heads: int = 2, causal: bool = False, reduce: int = 4) -> CallShape:
    """One sequence, head size 128, bf16."""
    return CallShape(1, rows, heads, kv_heads, 128, 128, 2, reduce, 4, causal)
