"""One rank of the tests of transports on GPUs: some checks, one after the other. A failed one ends it with an
error.

transport_ranks.py race engine graph repeat memory beside killed  [--transport T] [--nccl]
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from cases import Results, Shape
from distributed import LAYOUTS, Case, assert_equals_oracle, assert_same_bits, run_case
from meshattn.plan import Assignment, CallShape, Tile, tiles
from meshattn.plan.cost import memory as formula
from meshattn.transport.base import Message, Transport
from meshattn.transport.exchange import Place

STEPS = 200
NBYTES = 4 * 2**20
LONGEST_DELAY = 1_500_000  # clock cycles, a little less than a millisecond
EXACT = (Shape(B=2, S=157, H=6, H_kv=3, D=64), Shape(B=1, S=89, H=4, H_kv=1, D=32, D_v=16))
FAST = Shape(B=1, S=1031, H=4, H_kv=2, D=64)
PASSED = "passed:"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--transport", default="symmetric", help="of killed")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=500, help="of training")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if options.nccl else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    for name in options.checks:
        begin = time.monotonic()
        CHECKS[name](options)
        dist.barrier()
        say(f"{PASSED} {name} after {time.monotonic() - begin:.1f} s")
    dist.destroy_process_group()


def transports(options: argparse.Namespace) -> tuple[str, ...]:
    """Those that the ranks can use."""
    return ("symmetric", "p2p") if options.nccl else ("symmetric",)


def say(text: str) -> None:
    print(f"[{dist.get_rank()}] {text}", flush=True)


# Bytes under random delays


def race(options: argparse.Namespace) -> None:
    """No wrong byte with 1 to 3 slots on rows and columns; some without grants."""
    ranks = dist.get_world_size()
    square = next(tile for tile in reversed(tiles(ranks)) if tile.a <= tile.b)
    mesh = ma.init_attention_mesh(tile=square, transport="symmetric", timeout=options.timeout)
    say(mesh.describe())
    device = torch.device("cuda", torch.cuda.current_device())
    for slots in (1, 2, 3):
        begin = time.monotonic()
        wrong = _race(mesh, mesh.transports(square, device), square, slots, STEPS)
        mesh.check()
        dist.barrier()
        say(f"{slots} slots: {wrong} wrong words in {STEPS} steps, {time.monotonic() - begin:.1f} s")
        assert wrong == 0, f"{wrong} wrong words with {slots} slots"
    mesh.close()
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":  # where a standstill ends the process
        _control(square)


def _control(tile: Tile) -> None:
    """Without waiting for grants: wrong bytes, or a standstill that the watch ends."""
    mesh = ma.init_attention_mesh(tile=tile, transport="symmetric", timeout=2.0)
    device = torch.device("cuda", torch.cuda.current_device())
    engine_ = mesh.connection.engine
    assert engine_ is not None
    wait, of, grants = engine_.ops.wait, Place.of, set[int]()

    def placed(*args: Any) -> Place:
        place = of(*args)
        grants.add(place.granted)
        return place

    engine_.ops.wait = lambda stream, address, value: address in grants or wait(stream, address, value)  # type: ignore[method-assign]
    Place.of = placed  # type: ignore[method-assign]
    spoilt = 0
    try:
        spoilt = _race(mesh, mesh.transports(tile, device), tile, 1, 50)
        say(f"without grants: {spoilt} wrong words")
        mesh.check()
    except ma.TransportError as error:
        say(f"without grants: {error}")
        spoilt = max(spoilt, 1)
    Place.of = of  # type: ignore[method-assign]
    torch.cuda.synchronize()
    seen = torch.tensor([spoilt])
    dist.all_reduce(seen)
    assert int(seen) > 0, "the check sees nothing"


def _race(
    mesh: ma.AttentionMesh, transports: dict[str, Transport], tile: Tile, slots: int, steps: int
) -> int:
    device = torch.device("cuda", torch.cuda.current_device())
    engine_ = mesh.connection.engine
    assert engine_ is not None
    comm = torch.cuda.ExternalStream(engine_.ops.comm_stream)
    rings = {axis: mesh._ring(Assignment(tile), axis) for axis in ("row", "col") if tile.size(axis) > 1}  # type: ignore[arg-type]
    chance = random.Random(mesh.rank)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)
    sends = {axis: [torch.empty(NBYTES, dtype=torch.uint8, device=device) for _ in "ab"] for axis in rings}
    received = {axis: transports[axis].buffers(axis, "inward", NBYTES, slots, device) for axis in rings}
    for step in range(steps):
        handles = {}
        for number, (axis, ring) in enumerate(rings.items()):
            torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
            send = sends[axis][step % 2]
            send.view(torch.int32).fill_(mesh.rank * 100_000 + step * 10 + number)
            source, to = ring[mesh.rank], ring.index(mesh.rank)
            slot = step % slots
            message = Message("forward", axis, "inward", f"race {axis} {step}", to, source, slot)
            handles[axis] = transports[axis].start(message, [send], received[axis][slot])
            with torch.cuda.stream(comm):
                torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
        for number, (axis, ring) in enumerate(rings.items()):
            torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
            handles[axis].wait()
            got = received[axis][step % slots]
            wrong += (got.view(torch.int32) != ring[mesh.rank] * 100_000 + step * 10 + number).sum()
            got.fill_(255)
            handles[axis].release()
    torch.cuda.synchronize()
    return int(wrong)


# The engine


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


# A rank that dies


def killed(options: argparse.Namespace) -> None:
    """The others raise within the timeout, at the latest after they have synchronised and checked."""
    ranks = dist.get_world_size()
    mesh = ma.init_attention_mesh(tile=(1, ranks), transport=options.transport, timeout=options.timeout)
    seq = mesh.sequence(256 * ranks)
    q, k, v = (torch.randn(1, 256, 4, 64, device="cuda", requires_grad=True) for _ in range(3))

    def attend() -> Tensor:
        out = ma.mesh_attention(q, k, v, seq, kernel="reference")
        assert isinstance(out, Tensor)
        out.sum().backward()
        return out

    for _ in range(3):
        attend()
    torch.cuda.synchronize()
    dist.barrier()
    if dist.get_rank() == ranks - 1:
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


# CUDA graphs


class _Passes:
    """A forward and a backward pass on a mesh, eager or as a CUDA graph, on inputs that can be drawn anew."""

    def __init__(self, mesh: ma.AttentionMesh, rows: int, heads: int = 4) -> None:
        self.kernel = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
        self._seq = mesh.sequence(rows * dist.get_world_size())
        self._size = (1, rows, heads, 64)
        self.q, self.k, self.v, self.do = (
            torch.empty(self._size, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        self.draw(0)
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self._graph: torch.cuda.CUDAGraph | None = None

    def draw(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(100 * seed + dist.get_rank())
        with torch.no_grad():
            for x in (self.q, self.k, self.v, self.do):
                x.copy_(torch.randn(self._size, device="cuda", generator=generator))

    def eager(self) -> list[Tensor]:
        out = ma.mesh_attention(self.q, self.k, self.v, self._seq, causal=True, kernel=self.kernel)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), self.do)]

    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        dist.barrier()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._captured = self.eager()

    def forget(self) -> None:
        """Before the mesh is closed: NCCL waits for graphs that know it."""
        assert self._graph is not None
        self._graph.reset()

    def replay(self) -> list[Tensor]:
        assert self._graph is not None
        self._graph.replay()
        return [x.clone() for x in self._captured]


def _equal(mine: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


def graph(options: argparse.Namespace) -> None:
    """A captured pass gives the bits of an eager one, on other inputs too, with graphs of all transports in
    turns."""
    for tile in tiles(dist.get_world_size()):
        meshes = [
            ma.init_attention_mesh(tile=tile, transport=transport, timeout=options.timeout)
            for transport in transports(options)
        ]
        every = [_Passes(mesh, 512) for mesh in meshes]
        for passes in every:
            passes.capture()
        for number in range(20):
            for passes in every:
                passes.draw(number)
                assert _equal(passes.replay(), passes.eager()), "other bits"
        torch.cuda.synchronize()
        for mesh, passes in zip(meshes, every, strict=True):
            _report_times(mesh.describe(), passes.replay, passes.eager)
        dist.barrier()
        for mesh, passes in zip(meshes, every, strict=True):
            mesh.check()
            passes.forget()
            mesh.close()


def repeat(options: argparse.Namespace) -> None:
    """20 runs on each transport, eager and captured, beside other work on the GPU: the same bits always."""
    ranks = dist.get_world_size()
    chance = random.Random(dist.get_rank())
    load = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    for tile in tiles(ranks):
        first: list[Tensor] = []
        for transport in transports(options):
            mesh = ma.init_attention_mesh(tile=tile, transport=transport, timeout=options.timeout)
            passes = _Passes(mesh, 4100)  # long enough for a cut block
            first = first or passes.eager()
            passes.capture()
            for number in range(20):
                with torch.cuda.stream(beside):
                    for _ in range(chance.randrange(12)):
                        torch.mm(load, load)
                torch.cuda._sleep(chance.randrange(LONGEST_DELAY))
                for name, run in (("eager", passes.eager), ("captured", passes.replay)):
                    assert _equal(run(), first), f"{tile} {transport} {name}, run {number}: other bits"
            mesh.check()
            torch.cuda.synchronize()
            dist.barrier()
            passes.forget()
            mesh.close()
            say(f"{tile} {transport}: the same bits")


def memory(options: argparse.Namespace) -> None:
    """Buffers are those of the formula, and steady calls make no new ones."""
    for tile, transport in itertools.product(tiles(dist.get_world_size()), transports(options)):
        mesh = ma.init_attention_mesh(tile=tile, transport=transport, timeout=options.timeout)
        passes = _Passes(mesh, 4096, heads=16)
        shape = CallShape(1, 4096, 16, 16, 64, 64, itemsize=2, reduce_itemsize=4, acc_itemsize=4, causal=True)
        for _ in range(3):
            passes.eager()
        torch.cuda.synchronize()
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(40):
            passes.eager()
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved, "steady calls take more memory"
        peak = torch.cuda.max_memory_allocated() - held
        forward, backward = (formula(direction, tile, shape) for direction in ("forward", "backward"))
        arrives = max(forward.chunks, backward.chunks), max(forward.receive, backward.receive)
        # Beside them: out, its lse, three gradients, delta, what the kernel keeps a row, and rounding.
        rows = 4096 * 16
        results, per_row = 4 * rows * 64 * 2 + rows * 4, rows * 4 * 4
        own = backward.accumulators + backward.staging
        if transport == "symmetric":
            copying = mesh.connection.copying
            assert copying is not None
            taken = copying.receive_bytes
            say(f"{tile}: {taken} bytes to receive in, formula {sum(arrives)}")
            # A slot that grows from pass to pass, as those of queries do, grows by up to an eighth more.
            assert sum(arrives) <= taken <= 1.125 * sum(arrives) + 2**16
        else:
            own += backward.packed + backward.chunks + backward.receive
        say(f"{tile} {transport}: peak {peak}, formula {own} and results {results}")
        assert own <= peak <= own + results + per_row + 2**20
        dist.barrier()
        mesh.check()
        mesh.close()


def _report_times(where: str, replay: Callable[[], object], run: Callable[[], object]) -> None:
    for name, work in (("replayed", replay), ("eager", run)):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(20):
            work()
        enqueued = time.perf_counter() - begin
        torch.cuda.synchronize()
        spent = time.perf_counter() - begin
        if dist.get_rank() == 0:
            say(f"{where} {name}: {spent * 50:.3f} ms a pass, host {enqueued * 50:.3f} ms")


# Collectives of others


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
        mine = []
        for number in range(options.steps):
            seq = mesh.sequence(lengths.choice((700, 1031, 2000, 4096, 9001)))
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
        assert losses[-1].isfinite().all()
        mesh.check()
        mesh.close()
    say(f"{options.steps} steps, last loss {losses[0][-1].item():.6f}")
    assert torch.equal(*losses), "the transports give other losses"


CHECKS = {
    "race": race,
    "engine": engine,
    "killed": killed,
    "graph": graph,
    "repeat": repeat,
    "memory": memory,
    "beside": beside,
}

if __name__ == "__main__":
    main()
