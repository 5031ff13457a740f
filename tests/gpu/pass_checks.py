"""Passes again and again on each transport, eager and as CUDA graphs: bits, and memory."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from gpu.rank_talk import LONGEST_DELAY, say, transports
from meshattn.plan import CallShape, tiles
from meshattn.plan.cost import memory as formula


class _Passes:
    """A forward and a backward pass on a mesh, eager or as a CUDA graph, on inputs that can be drawn anew."""

    def __init__(self, mesh: ma.AttentionMesh, rows: int, heads: int = 4) -> None:
        self.kernel = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
        self._seq = mesh.sequence(rows * dist.get_world_size())
        self._size = (1, rows, heads, 64)
        self.allocate()
        self._graph: torch.cuda.CUDAGraph | None = None

    def allocate(self) -> None:
        """Inputs in memory that is got from the driver, like all other memory of the passes."""
        self.q = self.k = self.v = self.do = torch.empty(0)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.q, self.k, self.v, self.do = (
            torch.empty(self._size, device="cuda", dtype=torch.bfloat16) for _ in range(4)
        )
        self.draw(0)
        for x in (self.q, self.k, self.v):
            x.requires_grad_()

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


def recorded(options: argparse.Namespace) -> None:
    """Passes that recur are recorded, and have the bits and the traffic of those that are not: with other
    numbers, on other streams, beside a graph of the user's, and after receive memory has grown."""
    for tile, transport in itertools.product(tiles(dist.get_world_size()), transports(options)):
        known = {"tile": tile, "transport": transport, "timeout": options.timeout}
        mesh, other = (ma.init_attention_mesh(**known, cuda_graphs=yes) for yes in (True, False))
        # Ranks record when the memory of each recurs.
        mixed = ma.init_attention_mesh(**known, cuda_graphs=dist.get_rank() % 2 == 0)
        passes, plain, larger = _Passes(mesh, 519), _Passes(other, 519), _Passes(mesh, 1100)
        half = _Passes(mixed, 519)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
        recorder = mesh.recorder(torch.device("cuda", torch.cuda.current_device()))
        assert recorder is not None and other.recorder(passes.q.device) is None
        counts = []
        for number in range(24):
            for each in (passes, plain, half):
                each.draw(number)
            stream = streams[number // 8 % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                mine, theirs = passes.eager(), plain.eager()
                assert _equal(half.eager(), theirs), f"{tile} {transport}, call {number}: mixed"
            torch.cuda.current_stream().wait_stream(stream)
            assert _equal(mine, theirs), f"{tile} {transport}, call {number}: other bits"
            del mine, theirs  # or those of the next call would lie elsewhere
            if number == 11:
                larger.eager()
            counts.append(recorder.recordings)
        if "expandable" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
            assert counts[-1] == 0, "memory that may change unseen"
        else:
            assert 2 <= counts[7] < counts[-1] <= 12, f"recordings: {counts}"
        for each in (mesh, other):
            each.reset_traffic()
        for each in (passes, plain):
            each.eager()
        assert mesh.traffic() == other.traffic(), "replays count otherwise"
        wide, same = _Passes(mesh, 4100, heads=16), _Passes(other, 4100, heads=16)
        for number in range(5):  # in memory that the driver has got back and given again meanwhile
            got = []
            for each in (wide, same):
                each.allocate()
                each.draw(number)
                for _ in range(3):
                    results = each.eager()
                got.append([x.cpu() for x in results])
                del results
            assert _equal(*got), f"{tile} {transport}: other bits in memory that is given again"
        passes.capture()
        for number in range(4):
            passes.draw(50 + number)
            assert _equal(passes.replay(), passes.eager()), "other bits than a graph of the user's"
        say(f"{tile} {transport}: {counts[-1]} recordings")
        torch.cuda.synchronize()
        dist.barrier()
        mesh.check()
        passes.forget()
        for each in (mesh, other, mixed):
            each.close()


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
        for _ in range(8):  # also those that are recorded
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
            own += backward.chunks + backward.receive
        say(f"{tile} {transport}: peak {peak}, formula {own} and results {results}")
        assert own <= peak <= own + results + per_row + 2**20
        dist.barrier()
        mesh.check()
        copying = mesh.connection.copying
        regions = [weakref.ref(arena.region) for arena in copying._arenas.values()] if copying else []
        del copying
        gc.disable()  # which might come while a graph is captured, where nothing can be freed
        mesh.close()
        assert not any(region() for region in regions), "receive memory outlives its mesh"
        gc.enable()


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
