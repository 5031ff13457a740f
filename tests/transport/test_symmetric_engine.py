"""The engine over copy engines that are threads: results and bits, on every tile and with every mask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from cases import Shape
from distributed import assert_equals_oracle, assert_same_bits, run_cases
from fake_streams import SharedMemory, Threaded
from mesh_cases import Case, Packed
from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.hops import Paths
from meshattn.testing import run_ranks
from meshattn.transport.exchange import CopyEngine
from meshattn.transport.symmetric import SymmetricTransport
from meshattn.transport.threads import ThreadTransport


@pytest.fixture
def on_copy_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopyEngine]]:
    """Meshes of simulated groups move everything by copy engines that are threads."""
    engines: list[CopyEngine] = []
    memories: dict[int, SharedMemory] = {}
    lock = threading.Lock()

    def of(mesh: Any) -> Any:
        whole = mesh.connection.transport
        assert isinstance(whole, ThreadTransport)
        if not hasattr(mesh, "fake_engine"):
            with lock:
                memory = memories.setdefault(whole._connection, SharedMemory(mesh.size))
            ops = Threaded(mesh.rank, longest_delay=0.002)
            mesh.fake_engine = CopyEngine(
                ops,
                lambda n: memory.allocate(mesh.rank, n),
                mesh.rank,
                mesh.connection.names,
                mesh.connection.timeout,
            )
            mesh.fake_transport = SymmetricTransport(mesh.fake_engine, whole, whole.traffic)
            engines.append(mesh.fake_engine)
        return mesh.fake_transport

    def transports(mesh: Any, tile: Tile, device: torch.device, paths: Paths) -> dict[str, Any]:
        return dict.fromkeys(("row", "col"), of(mesh))

    monkeypatch.setattr(ma.AttentionMesh, "transports", transports)
    monkeypatch.setattr(ma.AttentionMesh, "head_transport", lambda mesh, device: of(mesh))
    yield engines
    for engine in engines:
        engine.close()


SHAPE = Shape(B=1, S=29, H=2, H_kv=1, D=8)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("tile", [t for ranks in (2, 4, 6) for t in tiles(ranks)], ids=str)
def test_the_engine_gives_the_same_bits(tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """Two calls with other sizes, a ring on the same mesh, and partial results in the input type."""
    cases = [
        Case(tile, SHAPE, dtype=torch.float32),
        Case(tile, replace(SHAPE, S=41, B=2), layout="zigzag", dtype=torch.bfloat16),
        Case(tile, SHAPE, dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        Case(tile, SHAPE, dtype=torch.float32, causal=False),
        Case(tile, SHAPE, layout="contiguous", dtype=torch.float32),  # ranks exchange with many peers
    ]
    if tile.a == 1 or tile.b == 1:
        cases.append(Case(tile, SHAPE, dtype=torch.float32, ring=True))
    mine = run_cases(cases)
    assert len(on_copy_engines) == tile.ranks and not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank in zip(cases, mine, strict=True):
        assert_equals_oracle(case, by_rank)
    again = run_cases(cases)
    for first, second in zip(mine, again, strict=True):
        assert_same_bits(first, second)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("heads", "tile"), [(2, Tile(1, 1)), (3, Tile(1, 1)), (2, Tile(2, 1)), (2, Tile(1, 2))], ids=str
)
def test_exchanges_of_heads(heads: int, tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """With every peer of the axis, one group in while another goes out, beside the rings of a tile."""
    shape = Shape(B=2, S=29, H=12, H_kv=6, D=8)
    cases = [
        Case(tile, shape, dtype=torch.float32, heads=heads, head_groups=1),
        Case(tile, replace(shape, S=43, H_kv=12), "zigzag", dtype=torch.bfloat16, heads=heads, head_groups=2),
        Case(tile, shape, "contiguous", dtype=torch.float32, window_size=(4, 0), heads=heads, head_groups=1),
        Case(tile, replace(shape, H_kv=1), dtype=torch.bfloat16, heads=heads, head_groups=1),
    ]
    mine, again = run_cases(cases), run_cases(cases)
    assert not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank, others in zip(cases, mine, again, strict=True):
        assert_equals_oracle(case, by_rank)
        assert_same_bits(by_rank, others)


@pytest.mark.timeout(60)
def test_two_layers_share_memory(on_copy_engines: list[CopyEngine]) -> None:
    """The forward pass of the second layer comes before the backward pass of the first."""
    case = Case(Tile(2, 2), SHAPE, dtype=torch.float32)

    def on_rank(group: Any) -> list[Tensor]:
        mesh = ma.init_attention_mesh(group, tile=case.tile)
        seq = mesh.sequence(SHAPE.S)
        generator = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(1, seq.rows, 2, 8, generator=generator, requires_grad=True)
        once = ma.mesh_attention(x, x[:, :, :1], x[:, :, :1], seq, causal=True)
        assert isinstance(once, Tensor)
        twice = ma.mesh_attention(once, once[:, :, :1], x[:, :, :1], seq)
        assert isinstance(twice, Tensor)
        (gradient,) = torch.autograd.grad(twice.square().sum(), x)
        return [twice.detach(), gradient]

    mine = run_ranks(4, on_rank)
    assert run_ranks(4, on_rank)[0][1].equal(mine[0][1])
    assert not any(e.watch.failure for e in on_copy_engines)
    assert all(x.isfinite().all() for results in mine for x in results)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("tile", [t for ranks in (2, 4) for t in tiles(ranks)], ids=str)
def test_hops_that_masks_leave_out(tile: Tile, on_copy_engines: list[CopyEngine]) -> None:
    """Halves of exchanges that do not take place, rings that turn, axes that are direct; in turns, so that
    the slots are used with and without."""
    packed = Packed((0, 3, 8, 8, 16, 21))
    shape = replace(SHAPE, S_k=37)
    cases = [
        Case(tile, SHAPE, "contiguous", dtype=torch.float32, documents=packed),
        Case(tile, SHAPE, dtype=torch.float32),
        Case(tile, SHAPE, "contiguous", dtype=torch.float32),
        Case(tile, SHAPE, "contiguous", dtype=torch.float32, window_size=(4, 0)),
        Case(tile, SHAPE, "zigzag", dtype=torch.float32, causal=False, documents=packed),
        Case(tile, shape, "striped", dtype=torch.float32, kv_layout="contiguous"),
        Case(tile, replace(SHAPE, S=1, S_k=9), dtype=torch.float32, kv_layout="striped"),
    ]
    mine = run_cases(cases)
    assert not any(e.watch.failure for e in on_copy_engines)
    for case, by_rank in zip(cases, mine, strict=True):
        assert_equals_oracle(case, by_rank)
