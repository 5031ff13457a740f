"""Ring-Attention against every mesh tile on the ranks that there are.

    python benchmarks/distributed.py                      four gloo ranks, or one rank a GPU
    torchrun --nproc-per-node 8 benchmarks/distributed.py --seq-len 131072 --heads 32 --kv-heads 8

First checks every tile against dense attention in float64 on a short sequence, then times forward and
backward. A time is that of the slowest rank; tiles take turns within each repeat, so that drift of the
machine hits all alike.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from harness import REPORTS, Machine, Record, Timing, table, write
from meshattn import reference
from meshattn.plan import CallShape, Tile, tiles, total_bytes
from meshattn.plan.cost import peak_memory

PASSES = ("forward", "backward")
CHECKED_LENGTH = 61
CHECKED_ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


@dataclass(frozen=True)
class Case:
    """What is timed."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    layout: str

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"B{self.batch}-S{self.seq_len}-H{self.heads}-H_kv{self.kv_heads}-D{self.head_dim}-{kind}-{mask}-"
            f"{self.layout}"
        )

    def shape(self, rows: int) -> CallShape:
        exact = 8 if self.dtype == torch.float64 else 4
        return CallShape(
            batch=self.batch,
            rows=rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            itemsize=self.dtype.itemsize,
            reduce_itemsize=exact,
            acc_itemsize=exact,
            causal=self.causal,
        )


@dataclass(frozen=True)
class Result:
    """Of one tile."""

    tile: Tile
    times: dict[str, Timing]
    measured_bytes: dict[str, int]
    formula_bytes: dict[str, int]
    memory: int


def main(arguments: list[str] | None = None) -> None:
    options = _parse(arguments)
    if "RANK" not in os.environ:
        _start_ranks(options.ranks)
    device = _join(options.timeout)
    case = Case(
        seq_len=options.seq_len,
        batch=options.batch_size,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim,
        dtype=getattr(torch, options.dtype),
        causal=not options.full,
        layout=options.layout,
    )
    wanted = [Tile.parse(text) for text in options.tile] or list(tiles(dist.get_world_size()))
    ring = Tile(1, dist.get_world_size())
    chosen = [ring, *(tile for tile in wanted if tile != ring)]
    meshes = {tile: ma.init_attention_mesh(tile=tile, timeout=options.timeout) for tile in chosen}
    for tile, mesh in meshes.items():
        _check(tile, mesh, case, device)
    results = _measure(meshes, case, device, options.repeats)
    if dist.get_rank() == 0:
        _report(case, results, Path(options.out))
    dist.barrier()
    dist.destroy_process_group()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="ranks to start without torchrun (default: GPUs, else 4)")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--layout", choices=("striped", "zigzag", "contiguous"), default="striped")
    parser.add_argument("--tile", action="append", default=[], help="AxB, repeatable (default: all)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a rank waits for another")
    parser.add_argument("--out", default=str(REPORTS), help="folder of the report")
    return parser.parse_args(arguments)


def _start_ranks(ranks: int | None) -> None:
    """Become torchrun, with as many ranks as there are GPUs, else four."""
    count = ranks or torch.cuda.device_count() or 4
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", *sys.argv]
    os.execv(sys.executable, [sys.executable, *command])


def _join(timeout: float) -> torch.device:
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    return device


def _inputs(case: Case, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        size = (case.batch, seq_len, heads, case.head_dim)
        return torch.randn(size, generator=generator).to(device, case.dtype)

    return normal(case.heads), normal(case.kv_heads), normal(case.kv_heads), normal(case.heads)


def _check(tile: Tile, mesh: ma.AttentionMesh, case: Case, device: torch.device) -> None:
    """Raise unless out and all gradients agree with dense attention in float64 on a short odd length."""
    whole = _inputs(case, CHECKED_LENGTH, device)
    seq = mesh.sequence(CHECKED_LENGTH, layout=case.layout)  # type: ignore[arg-type]
    q, k, v, do = (seq.shard(x) for x in whole)
    got = _attend(q, k, v, do, seq, case)
    exact = [x.double().cpu().requires_grad_() for x in whole[:3]]
    out, _ = reference.attention(*exact, causal=case.causal)
    want = [out, *torch.autograd.grad(out, exact, whole[3].double().cpu())]
    for name, mine, oracle in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = (seq.unshard(mine).double().cpu() - oracle).abs().max().item() / oracle.abs().max().item()
        if not error <= CHECKED_ERROR[case.dtype]:
            raise RuntimeError(
                f"tile {tile}: {name} differs from the oracle by {error:.2e}; nothing was timed"
            )


def _attend(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, seq: ma.ShardedSequence, case: Case
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = ma.mesh_attention(q, k, v, seq, causal=case.causal)
    assert isinstance(out, Tensor)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    return out.detach(), dq, dk, dv


def _measure(
    meshes: dict[Tile, ma.AttentionMesh], case: Case, device: torch.device, repeats: int
) -> list[Result]:
    whole = _inputs(case, case.seq_len, device)
    runs: dict[Tile, dict[str, list[float]]] = {tile: {"forward": [], "backward": []} for tile in meshes}
    sent: dict[Tile, dict[str, int]] = {}
    rows = 0
    for repeat in range(repeats + 1):  # the first one warms up
        for tile, mesh in meshes.items():
            seq = mesh.sequence(case.seq_len, layout=case.layout)  # type: ignore[arg-type]
            rows = seq.rows
            q, k, v, do = (seq.shard(x) for x in whole)
            q, k, v = (x.requires_grad_() for x in (q, k, v))
            mesh.reset_traffic()
            out = None

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v, seq: ma.ShardedSequence = seq) -> Tensor:
                result = ma.mesh_attention(q, k, v, seq, causal=case.causal)
                assert isinstance(result, Tensor)
                return result

            spent, out = _timed(forward, device)
            spent_backward, _ = _timed(lambda out=out, do=do: out.backward(do), device)  # type: ignore[misc]
            if repeat > 0:
                runs[tile]["forward"].append(spent)
                runs[tile]["backward"].append(spent_backward)
            records = mesh.traffic()
            sent[tile] = {p: sum(r.sent_bytes for r in records if r.phase == p) for p in PASSES}
    shape = case.shape(rows)
    return [
        Result(
            tile=tile,
            times={name: Timing.of(milliseconds) for name, milliseconds in runs[tile].items()},
            measured_bytes=sent[tile],
            formula_bytes={p: total_bytes(p, tile, shape) for p in PASSES},  # type: ignore[misc, arg-type]
            memory=max(peak_memory(p, tile, shape) for p in PASSES),  # type: ignore[arg-type]
        )
        for tile in meshes
    ]


def _timed(run: Callable[[], Tensor | None], device: torch.device) -> tuple[float, Tensor]:
    """Milliseconds of the slowest rank, and the result."""
    _settle(device)
    dist.barrier()
    begin = time.perf_counter()
    result = run()
    _settle(device)
    spent = torch.tensor([(time.perf_counter() - begin) * 1e3], device=device)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item(), result if result is not None else spent


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _report(case: Case, results: list[Result], folder: Path) -> None:
    machine = Machine.here()
    ring = results[0]
    head = [
        "tile",
        "forward ms",
        "backward ms",
        "time / ring",
        "MiB sent fwd",
        "by formula",
        "MiB sent bwd",
        "by formula",
        "bytes / ring",
        "buffers MiB",
    ]
    rows, records = [], []
    for result in results:
        took = {name: timing.median for name, timing in result.times.items()}
        ratio = sum(took.values()) / sum(timing.median for timing in ring.times.values())
        moved = sum(result.measured_bytes.values()) / max(1, sum(ring.measured_bytes.values()))
        name = f"{result.tile}" + (" ring" if result is ring else "")
        rows.append(
            [
                name,
                str(result.times["forward"]),
                str(result.times["backward"]),
                f"{ratio:.2f}",
                _mib(result.measured_bytes["forward"]),
                _mib(result.formula_bytes["forward"]),
                _mib(result.measured_bytes["backward"]),
                _mib(result.formula_bytes["backward"]),
                f"{moved:.2f}",
                _mib(result.memory),
            ]
        )
        label = f"{case}-P{result.tile.ranks}-{result.tile}"
        for step in PASSES:
            timing = result.times[step]
            against = ring.times[step].median
            records.append(
                Record(
                    "distributed",
                    label,
                    f"{step} ms",
                    timing.median,
                    "ring",
                    timing.median / against,
                    timing.spread,
                )
            )
            measured, formula = result.measured_bytes[step], result.formula_bytes[step]
            records.append(
                Record(
                    "distributed",
                    label,
                    f"{step} bytes",
                    measured,
                    "formula",
                    measured / formula if formula else None,
                )
            )
    text = "\n\n".join(
        [
            f"# Ring and mesh tiles, {results[0].tile.ranks} ranks",
            machine.describe(),
            f"Case {case}. Medians (middle three fifths) over repeats in which the tiles take turns; a time "
            "is that of the slowest rank. Bytes are sent per rank; every tile was checked against float64 "
            "dense attention first.",
            table(head, rows),
            "",
        ]
    )
    print(text)
    name = f"distributed-{results[0].tile.ranks}-ranks"
    print(f"written to {write(name, [(machine, records)], text, folder)}")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


if __name__ == "__main__":
    main()
