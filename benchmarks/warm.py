"""Compile the kernels that other benchmarks will run, many at once, into Triton's cache.

    python benchmarks/warm.py --block 4096 32 8 128 --block 2048 16 16 64

The ranks of a benchmark all need the same kernels at the same time, and each compiles them one behind the
other. Here every few passes over a block of so many rows, query heads, key/value heads and head size have a
process of their own, on one GPU after the other: a dozen kernels take as long as one. What is cut short
leaves what it has compiled.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

import meshattn as ma
from meshattn.testing import run_ranks
from meshattn_kernels import UNBOUNDED, AttentionKernel, BandIntervals, choose_kernel, get_kernel
from meshattn_kernels.contract import ACCUMULATOR_KINDS, clear_accumulator, new_accumulator
from meshattn_kernels.merge import merge_partial


@dataclass(frozen=True)
class Block:
    """What is compiled for: a block of a step list."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kernel: str | None

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.heads} heads of {self.kv_heads}, size {self.head_dim}"

    def inputs(self, device: torch.device) -> tuple[Tensor, ...]:
        """q, k, v, do [1, rows, H, D]."""

        def normal(heads: int) -> Tensor:
            size = (1, self.rows, heads, self.head_dim)
            return torch.randn(size, device=device, dtype=getattr(torch, self.dtype))

        return normal(self.heads), normal(self.kv_heads), normal(self.kv_heads), normal(self.heads)


def alone(block: Block, device: torch.device) -> None:
    """A call of one rank, whose block is the whole sum, and what is done once a call."""
    *leaves, do = block.inputs(device)

    def rank(group: object) -> None:
        seq = ma.init_attention_mesh(group).sequence(block.rows)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = ma.mesh_attention(q, k, v, seq, causal=True, kernel=block.kernel)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out, (q, k, v), do)

    run_ranks(1, rank)


def forwards(causal: bool, block: Block, device: torch.device) -> None:
    """Blocks whose results go into accumulators, the first of a row and others, and their merge."""
    kernel, (q, k, v, _), intervals = _made(block, causal, device)
    out, other = (new_accumulator(kernel, "out", q, k, v) for _ in range(2))
    for first in (True, False):
        for acc in (out, other):
            kernel.forward(q, k, v, acc, intervals, softmax_scale=1.0, first=first)
    merge_partial(out["out"], out["lse"], other["out"], other["lse"])
    kernel.finish("out", out, dtype=q.dtype, softmax_scale=1.0)


def backwards(causal: bool, first_dkv: bool, block: Block, device: torch.device) -> None:
    """Blocks whose gradients are stored and added, those of queries by turns."""
    kernel, (q, k, v, do), intervals = _made(block, causal, device)
    accs = [new_accumulator(kernel, kind, q, k, v) for kind in ACCUMULATOR_KINDS]
    for acc in accs:
        clear_accumulator(acc)
    out, dq, dkv = accs
    delta = torch.zeros_like(out["lse"])
    for first in (True, False):
        kernel.backward(
            q, k, v, do, out["lse"], delta, dq, dkv, intervals,
            softmax_scale=1.0, first_dq=first, first_dkv=first_dkv,
        )  # fmt: skip
    kernel.finish("dq", dq, dtype=q.dtype, softmax_scale=1.0)
    kernel.finish("dkv", dkv, dtype=q.dtype, softmax_scale=1.0)


def _made(
    block: Block, causal: bool, device: torch.device
) -> tuple[AttentionKernel, tuple[Tensor, ...], BandIntervals]:
    q, k, v, do = block.inputs(device)
    chosen = choose_kernel(block.kernel, device, q.dtype, block.head_dim, block.head_dim)
    intervals = BandIntervals(0 if causal else -UNBOUNDED, UNBOUNDED, block.rows, block.rows)
    return get_kernel(chosen), (q, k, v, do), intervals


PASSES: Mapping[str, Callable[[Block, torch.device], None]] = {
    "alone": alone,
    "backward": partial(backwards, True, True),
    "adding": partial(backwards, True, False),
    "forward": partial(forwards, True),
    "full backward": partial(backwards, False, True),
    "full adding": partial(backwards, False, False),
    "full forward": partial(forwards, False),
}


def compile_passes(number: int, name: str, block: Block, device: str) -> float:
    """Run some passes, in a process that does nothing else; the seconds that they took."""
    begin = time.monotonic()
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
        PASSES[name](block, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()
    else:
        PASSES[name](block, torch.device(device))
    return time.monotonic() - begin


CAUSAL = [name for name in PASSES if not name.startswith("full")]
FULL = [name for name in PASSES if name.startswith("full")]
SIZES = ("ROWS", "HEADS", "KV_HEADS", "HEAD_DIM")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    each = {"type": int, "nargs": 4, "action": "append", "default": [], "metavar": SIZES}
    parser.add_argument("--block", help="causal, as calls have it", **each)
    parser.add_argument("--full-block", help="without a mask", **each)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kernel", help="local kernel by name (default: what the library chooses)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    causal, full = (
        [Block(*sizes, options.dtype, options.kernel) for sizes in given]
        for given in (options.block, options.full_block)
    )
    # Those first that take longest.
    wanted = list(dict.fromkeys([*product(CAUSAL, causal), *product(FULL, full)]))
    failed = 0
    # Forked from a process that has imported all and knows no GPU: this one may.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "meshattn", "meshattn_kernels"])
    processes = min(len(wanted), os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, context) as pool:
        jobs = {
            pool.submit(compile_passes, number, name, block, options.device): f"{name}, {block}"
            for number, (name, block) in enumerate(wanted)
        }
        for job in as_completed(jobs):
            error = job.exception()
            failed += error is not None
            said = f"{job.result():.1f} s" if error is None else f"{type(error).__name__}: {error}"
            print(f"{jobs[job]}: {said}", file=sys.stderr if error else sys.stdout, flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
