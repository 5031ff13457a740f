"""One attention layer, forward and backward, at a million tokens on the GPUs that there are.

    torchrun --nproc-per-node 2 benchmarks/million_tokens.py --cut 1x2 2x1 --transport symmetric

Every cut runs once: its results are held against float64 at sampled rows and keys, its peak memory against
the formula, its time against that of the kernel alone, at the shape of its blocks. A pass through a window of
the same length makes kernels and buffers before, and what is timed is queued behind --lead-seconds of matrix
products, during which the host makes its tables and the clock settles.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from across_ranks.million_report import Alone, Outcome, report
from across_ranks.rank_check import NAMES, Wrong, check, oracle
from across_ranks.rank_contenders import Case
from across_ranks.rank_cuts import DIRECTIONS, cut_of, formula_bytes, formula_memory, name_of
from across_ranks.rank_memory import allocated, peak_allocated
from across_ranks.rank_start import join, start_ranks
from across_ranks.sampled_oracle import Samples, errors_of_sums, sample, sampled_errors, sums
from harness import REPORTS
from meshattn.layouts import Layout
from meshattn.masks import MaskRule, block_intervals
from meshattn.plan.heads import inner_shape
from meshattn.plan.placement import Cut
from meshattn_kernels import BandIntervals, choose_kernel, get_kernel
from meshattn_kernels.contract import ACCUMULATOR_KINDS, new_accumulator

MOST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SHORT_SECONDS = 3.0
MULTIPLIER = 6364136223846793005
WINDOW = (1023, 0)  # of the pass before: a thousandth of the work at a million tokens


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if "RANK" not in os.environ:
        start_ranks(None)
    device = join(options.timeout)
    case = Case(
        seq_len=options.seq_len,
        batch=1,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        causal=True,
        layout="striped",
        kernel=options.kernel,
    )
    say = _Clock()
    samples = sample(case.inputs(device), spread=options.spread, last=options.last, num_keys=options.keys)
    say(f"{len(samples.rows)} rows and {len(samples.keys)} keys in float64")
    exact = oracle(case, device)
    alone = kernel_alone(case, device, options.lead_seconds)
    say(f"{alone}")
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    text = ""
    for name, kind in zip(options.cut, options.transport, strict=True):
        cut = cut_of(name)
        mesh = None
        try:
            mesh = ma.init_attention_mesh(
                tile=cut.tile, heads=cut.heads, transport=kind, timeout=options.timeout
            )
            check(mesh, case, device, exact)
        except (ValueError, Wrong) as error:  # on all ranks alike; it costs the others nothing
            wrong.append(f"{name} {kind}: {error}")
            if mesh is not None:
                mesh.close()
            continue
        say(f"{name} {kind} is right on a short sequence")
        found = measure(
            f"{name_of(cut)} {kind}", mesh, cut, case, samples, alone, device, options.lead_seconds
        )
        say(str(found))
        if is_right(found, case):
            outcomes.append(found)
        else:
            wrong.append(str(found))
        if dist.get_rank() == 0 and outcomes:  # after every run: a long one may be stopped
            text = report(case, outcomes, alone, samples, Path(options.out), options.commit)
        mesh.close()
    if dist.get_rank() == 0:
        print(text)
        for found in wrong:
            print(f"WRONG, and not in the report: {found}", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
    return int(bool(wrong))


def is_right(found: Outcome, case: Case) -> bool:
    """Whether it may be reported."""
    good = all(error <= MOST_ERROR[case.dtype] for error in found.errors.values())  # a NaN is none
    return good and found.sent == found.formula


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, default=2**20)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--kernel", help="local kernel by name (default: what the library chooses)")
    parser.add_argument("--cut", nargs="+", default=["1x2", "2x1"], help="AxB, or WxAxB with a head axis")
    parser.add_argument(
        "--transport",
        nargs="+",
        default=["auto"],
        choices=("auto", "symmetric", "p2p"),
        help="one for each cut, or one for all",
    )
    parser.add_argument("--spread", type=int, default=64, help="sampled rows over the whole sequence")
    parser.add_argument("--last", type=int, default=1024, help="rows at the end, all of which are sampled")
    parser.add_argument("--keys", type=int, default=256, help="sampled keys among the last rows")
    parser.add_argument(
        "--lead-seconds", type=float, default=1.0, help="of a large GPU that no other rank uses (default 1)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a rank waits for another")
    parser.add_argument("--out", default=str(REPORTS), help="folder of the report")
    parser.add_argument("--commit", help="name of the code, where it is no git checkout")
    options = parser.parse_args(arguments)
    if len(options.transport) == 1:
        options.transport *= len(options.cut)
    if len(options.transport) != len(options.cut):
        parser.error(f"{len(options.cut)} cuts and {len(options.transport)} transports")
    return options


class _Clock:
    """Says on rank 0 what is done, and when."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - self._begin:6.1f} s  {text}", file=sys.stderr, flush=True)


def kernel_alone(case: Case, device: torch.device, lead_seconds: float) -> Alone:
    """Measured for the rank's own block of a striped sequence, seconds scaled by the work. Collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kernel = get_kernel(case.kernel or choose_kernel(None, device, case.dtype, case.head_dim, case.head_dim))
    layout = Layout("striped", case.seq_len, ranks, -(-case.seq_len // ranks))
    whole = block_intervals(MaskRule.build(causal=True), layout, rank, layout, rank)
    assert isinstance(whole, BandIntervals)
    window = replace(whole, hi=min(whole.hi, WINDOW[0] // ranks))
    q, k, v, do = (x[:, rank::ranks].contiguous() for x in case.inputs(device))
    out, dq, dkv = (new_accumulator(kernel, kind, q, k, v) for kind in ACCUMULATOR_KINDS)
    scale, delta = case.head_dim**-0.5, torch.zeros_like(out["lse"])

    def forward(intervals: BandIntervals) -> None:
        kernel.forward(q, k, v, out, intervals, softmax_scale=scale, first=True)

    def backward(intervals: BandIntervals) -> None:
        lse, first = out["lse"], {"first_dq": True, "first_dkv": True}
        kernel.backward(q, k, v, do, lse, delta, dq, dkv, intervals, softmax_scale=scale, **first)

    forward(window)
    backward(window)
    held = allocated(device)
    # Twice forward: what the host makes for the backward is made meanwhile.
    (_, ahead, back), _ = in_turn(
        device, lead_seconds, lambda: forward(whole), lambda: forward(whole), lambda: backward(whole)
    )
    own = peak_allocated(device) - held
    scaled = case.seq_len * (case.seq_len + 1) / 2 / ranks / whole.num_pairs
    return Alone(ahead * scaled, back * scaled, own)


def measure(
    name: str,
    mesh: ma.AttentionMesh,
    cut: Cut,
    case: Case,
    samples: Samples,
    alone: Alone,
    device: torch.device,
    lead_seconds: float,
) -> Outcome:
    """Forward and backward; the worst of all ranks. Collective."""
    _free(device)  # what is not in use, for the memory of transports
    seq = mesh.sequence(case.seq_len)
    q, k, v, do = (seq.shard(x) for x in case.inputs(device))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    results: list[Tensor] = []

    def forward(window: tuple[int, int] = (-1, -1)) -> None:
        results.clear()
        mesh.reset_traffic()
        out = ma.mesh_attention(q, k, v, seq, causal=True, window_size=window, kernel=case.kernel)
        assert isinstance(out, Tensor)
        results.append(out)

    def backward() -> None:
        results.extend(torch.autograd.grad(results[0], (q, k, v), do))

    forward(WINDOW)
    backward()
    results.clear()
    held = allocated(device)
    (ahead, back), host = in_turn(device, lead_seconds, forward, backward)
    peak = peak_allocated(device) - held
    shape = case.shape(-(-case.seq_len // dist.get_world_size()))
    groups = mesh.split_heads(shape, device)[1]
    buffers = formula_memory(cut, shape, groups)
    computed = inner_shape(shape, cut.heads, groups)  # the blocks of a rank
    copying = mesh.connection.copying
    if copying is not None:
        peak += copying.receive_bytes
    sent = {p: sum(x.sent_bytes for x in mesh.traffic() if x.phase == p) for p in DIRECTIONS}
    found = dict(zip(NAMES, (x.detach() for x in results), strict=True))
    errors = sampled_errors(samples, seq.position_ids().to(device), found)
    both = sums((q.detach(), k.detach(), v.detach(), do), found).cpu()
    dist.all_reduce(both)
    out, *gradients = results
    mine = Outcome(
        name=name,
        forward=ahead,
        backward=back,
        host=host,
        errors=errors | errors_of_sums(both),
        sent=sent,
        formula={p: formula_bytes(p, cut, shape) for p in DIRECTIONS},
        peak=peak,
        kept=out.nbytes + 2 * shape.query_rows * shape.acc_itemsize,
        gradients=sum(x.nbytes for x in gradients),
        buffers=buffers,
        own=alone.own * computed.kv_rows // shape.kv_rows,
        bits=digest(results),
    )
    every: list[Outcome] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    bits = reduce(lambda total, x: (total * MULTIPLIER + x.bits) % 2**64, every, 0)
    worst = {name: _worst(x.errors[name] for x in every) for name in mine.errors}
    sent = next((x.sent for x in every if x.sent != x.formula), mine.sent)
    return replace(mine, errors=worst, sent=sent, peak=max(x.peak for x in every), bits=bits)


def digest(results: Sequence[Tensor]) -> int:
    """A number of 64 bits that follows from all bits of the results of a rank."""
    total = 0
    for tensor in results:
        for words in tensor.detach().contiguous().view(-1).view(torch.int64).split(2**24):
            weights = torch.arange(1, 2 * len(words), 2, device=words.device)
            total = (total * MULTIPLIER + int((words * weights).sum())) % 2**64
    return total


def _worst(errors: Iterable[float]) -> float:
    """The largest, or a NaN if there is one."""
    return float(torch.tensor(list(errors)).max())


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def in_turn(
    device: torch.device, lead_seconds: float, *works: Callable[[], object]
) -> tuple[list[float], float]:
    """Seconds of each of some works that follow each other, on the slowest rank, and of the host in all.
    Short ones are done twice: what the host makes at first is not hidden behind them. Collective."""
    first = _once(device, lead_seconds, *works)
    return _once(device, lead_seconds, *works) if sum(first[0]) < SHORT_SECONDS else first


def _once(
    device: torch.device, lead_seconds: float, *works: Callable[[], object]
) -> tuple[list[float], float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device.type == "cuda":
        _products(device, lead_seconds)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
        events[0].record()
        begin = time.perf_counter()
        for work, event in zip(works, events[1:], strict=True):
            work()
            event.record()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        spent = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    else:
        clock = [time.perf_counter()]
        for work in works:
            work()
            clock.append(time.perf_counter())
        spent = [b - a for a, b in itertools.pairwise(clock)]
        host = sum(spent)
    slowest = torch.tensor([*spent, host], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    *spent, host = slowest.tolist()
    return spent, host


def _products(device: torch.device, seconds: float) -> None:
    """About so many seconds of matrix products on a large GPU."""
    a = torch.randn(8192, 8192, device=device).bfloat16()
    for _ in range(round(seconds * 600e12 / (2 * 8192**3))):
        torch.mm(a, a)


if __name__ == "__main__":
    sys.exit(main())
