"""Time the portable kernels on this GPU, with the tilings of the table or others.

    python tests/kernels/time_portable.py
    python tests/kernels/time_portable.py --head-dim 128 --rows 16384 --try dkdv 64 128 3 8 --try dq 128 64 2
    8

16,384 tokens of 2,048 hidden, bf16. TF = 4 * B * H * S^2 * D (half of it for causal), x 2.5 for a backward;
medians of launches queued in the sustained state. ``--try`` runs the same once more with another tiling
(kernel, query tile, key/value tile, stages, warps). The tests marked gpu say whether results are right.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable

import torch

from meshattn_kernels import UNBOUNDED, BandIntervals
from meshattn_kernels.contract import new_accumulator
from meshattn_kernels.portable import launch
from meshattn_kernels.portable.kernel import TritonDashKernel, TritonKernel

TOKENS, HIDDEN = 16384, 2048


def median_ms(run: Callable[[], None], repeats: int = 24) -> float:
    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for event in events[:-1]:
        event.record()
        run()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def measure(head_dim: int, rows: int, causal: bool) -> dict[str, float]:
    """TF of every part."""
    batch, heads = TOKENS // rows, HIDDEN // head_dim
    q, k, v, do = (
        torch.randn(batch, rows, heads, head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(4)
    )
    intervals = BandIntervals(0 if causal else -UNBOUNDED, UNBOUNDED, rows, rows)
    scale = head_dim**-0.5
    flop = 4 * batch * heads * rows**2 * head_dim / (2 if causal else 1)
    out = new_accumulator(TritonKernel(), "out", q, k, v)
    found = {}
    for name, first in (("forward", True), ("forward, merging", False)):
        ms = median_ms(
            lambda first=first: TritonKernel().forward(
                q, k, v, out, intervals, softmax_scale=scale, first=first
            )
        )
        found[name] = flop / ms / 1e9
    TritonKernel().forward(q, k, v, out, intervals, softmax_scale=scale, first=True)
    delta = (out["out"] * do).sum(-1).transpose(1, 2).contiguous()
    kernels = {
        "triton": TritonKernel(),
        "triton-dash": TritonDashKernel(),
        "triton-dash, unordered": TritonDashKernel(deterministic=False),
    }
    for name, kernel in kernels.items():
        dq, dkv = (new_accumulator(kernel, kind, q, k, v) for kind in ("dq", "dkv"))

        def backward(kernel=kernel, dq=dq, dkv=dkv) -> None:
            kernel.backward(
                q, k, v, do, out["lse"], delta, dq, dkv, intervals,
                softmax_scale=scale, first_dq=True, first_dkv=True,
            )  # fmt: skip
            kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=scale)
            kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=scale)

        found[name] = 2.5 * flop / median_ms(backward) / 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--rows", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--try", dest="tilings", nargs=5, action="append", default=[])
    options = parser.parse_args()
    capability = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {launch.triton.__version__}")
    for head_dim in options.head_dim:
        for rows in options.rows:
            for causal in (False, True):
                print(f"\nD{head_dim} S{rows} {'causal' if causal else 'full'}")
                show("table", measure(head_dim, rows, causal))
                for which, *sizes in options.tilings:
                    original, table = launch.tiling, launch._HALF[which]
                    family = next(
                        key for key, tiles in table.items()
                        if key[1] == max(64, head_dim)
                        and tiles is original(which, head_dim, torch.bfloat16, capability)
                    )  # fmt: skip
                    kept = table[family]
                    table[family] = launch.Tiling(*map(int, sizes))
                    show(f"{which} {' '.join(sizes)}", measure(head_dim, rows, causal))
                    table[family] = kept


def show(label: str, found: dict[str, float]) -> None:
    assert not any(math.isnan(tf) for tf in found.values())
    print(f"  {label:24}" + "  ".join(f"{name} {tf:.0f}" for name, tf in found.items()), flush=True)


if __name__ == "__main__":
    main()
