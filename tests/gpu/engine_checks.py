"""The engine on GPUs: right results, a rank that dies, and training beside collectives of others."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from cases import Results, Shape
from distributed import assert_equals_oracle, assert_same_bits, run_case
from gpu.rank_talk import say
from mesh_cases import LAYOUTS, Case
from meshattn.plan import tiles

EXACT = (Shape(B=2, S=157, H=6, H_kv=3, D=64), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16))
FAST = Shape(B=1, S=1031, H=4, H_kv=2, D=64)


def engine(options: argparse.Namespace) -> None:
    """Every tile equals the oracle, twice with the same bits, and with those of the other transport."""
    ranks = dist.get_world_size()
    for tile in tiles(ranks):
        mesh = ma.init_attention_mesh(tile=tile, transport="symmetric", timeout=options.timeout)
        other = (
            ma.init_attention_mesh(tile=tile, transport="p2p", timeout=options.timeout)
            if options.nccl
            else None
        )
        if dist.get_rank() == 0:
            say(mesh.describe())
        cases = [
            (Case(tile, EXACT[0], layout=LAYOUTS[tile.a % 3], dtype=torch.float32), "reference"),
            (Case(tile, EXACT[1], dtype=torch.bfloat16, reduce_dtype=torch.bfloat16), "reference"),
            (Case(tile, EXACT[0], dtype=torch.float64, causal=False), "reference"),
        ]
        if torch.cuda.get_device_capability() == (9, 0):
            cases.append((Case(tile, FAST, dtype=torch.bfloat16), "hopper"))
        for case, kernel in cases:
            begin = time.monotonic()
            mine = run_case(mesh, case, device="cuda", kernel=kernel)
            again = run_case(mesh, case, device="cuda", kernel=kernel)
            assert_same_bits([mine], [again])
            if other is not None:
                assert_same_bits([mine], [run_case(other, case, device="cuda", kernel=kernel)])
                assert mesh.traffic() and mesh.traffic()[0].sent_bytes == 2 * other.traffic()[0].sent_bytes
                other.reset_traffic()
            mesh.reset_traffic()
            gathered: list[Results | None] = [None] * ranks
            dist.all_gather_object(gathered, mine)
            assert_equals_oracle(case, gathered)  # type: ignore[arg-type]
            if dist.get_rank() == 0:
                say(f"{case} {kernel}: right, {time.monotonic() - begin:.2f} s")
        mesh.check()
        mesh.close()
        if other is not None:
            other.close()


def _recurring(options: argparse.Namespace) -> tuple[ma.AttentionMesh, Callable[[], Tensor]]:
    """A mesh, and a call on it whose passes recur and are recorded, but for the kernel that never is."""
    ranks = dist.get_world_size()
    mesh = ma.init_attention_mesh(tile=(1, ranks), transport=options.transport, timeout=options.timeout)
    seq = mesh.sequence(256 * ranks)
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", requires_grad=True) for _ in range(3))

    def attend() -> Tensor:
        out = ma.mesh_attention(q, k, v, seq, kernel=options.kernel)
        assert isinstance(out, Tensor)
        out.sum().backward()
        return out

    for _ in range(8):
        attend()
    recorder = mesh.recorder(q.device)
    assert recorder is not None and (recorder.recordings > 0) == (options.kernel != "reference")
    torch.cuda.synchronize()
    dist.barrier()
    return mesh, attend


def killed(options: argparse.Namespace) -> None:
    """The others raise within the timeout, at the latest after they have synchronised and checked."""
    mesh, attend = _recurring(options)
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for number in range(1000):
            out = attend()
            torch.cuda.synchronize()
            finite = bool(out.isfinite().all())
            say(f"call {number} done after {time.monotonic() - begin:.1f} s, finite: {finite}")
            mesh.check()
    except ma.TransportError as error:
        say(f"raised after {time.monotonic() - begin:.1f} s: {error}")
        torch.cuda.synchronize()
        say("the device is free")
        os._exit(7)
    os._exit(8)


def unclosed(options: argparse.Namespace) -> None:
    """Process groups may go while passes are recorded, and the process ends."""
    _recurring(options)
    begin = time.monotonic()
    dist.destroy_process_group()
    print(f"destroyed after {time.monotonic() - begin:.1f} s", flush=True)  # nobody has a rank any more
    raise SystemExit


class _Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = torch.nn.Linear(width, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, seq: ma.ShardedSequence) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, -1, 64)).unbind(2)
        attended = ma.mesh_attention(q, k, v, seq, causal=True)
        assert isinstance(attended, Tensor)
        return x + self.out(attended.flatten(2))


def beside(options: argparse.Namespace) -> None:
    """Training under fully_shard with changing lengths gives the same losses on each transport, in bits."""
    from torch.distributed.fsdp import fully_shard

    losses = []
    for transport in ("symmetric", "p2p"):
        mesh = ma.init_attention_mesh(transport=transport, timeout=options.timeout)
        torch.manual_seed(0)
        layers = [_Layer(512).to("cuda", torch.bfloat16) for _ in range(3)]
        for layer in layers:
            fully_shard(layer)
        steps = torch.optim.SGD([w for layer in layers for w in layer.parameters()], lr=1e-3)
        lengths = random.Random(1)
        sequences = [mesh.sequence(length) for length in (700, 1031, 2000, 4096, 9001)]
        mine = []
        for number in range(options.steps):
            seq = lengths.choice(sequences)
            generator = torch.Generator(device="cuda").manual_seed(1000 * number + mesh.rank)
            x = torch.randn(1, seq.rows, 512, device="cuda", generator=generator).bfloat16()
            for layer in layers:
                x = layer(x, seq)
            loss = x.float().square().mean()
            loss.backward()
            steps.step()
            steps.zero_grad()
            mine.append(loss.detach())
        losses.append(torch.stack(mine))
        recorder = mesh.recorder(x.device)
        assert recorder is not None and recorder.recordings > 0
        assert losses[-1].isfinite().all()
        mesh.check()
        mesh.close()
    say(f"{options.steps} steps, last loss {losses[0][-1].item():.6f}")
    assert torch.equal(*losses), "the transports give other losses"
