"""Counted bytes equal the closed forms, and equal what an independent count of the send calls finds."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import meshattn as ma
from cases import Shape
from distributed import run_case
from mesh_cases import Case
from meshattn import engine
from meshattn.plan.assignment import Tile, tiles
from meshattn.plan.cost import CallShape, memory, total_bytes, traffic
from meshattn.plan.schedule import Direction
from meshattn.program import Call
from meshattn.testing import run_ranks
from meshattn.transport.base import Message, TrafficRecord
from meshattn.transport.threads import ThreadTransport
from meshattn_kernels.contract import AccumulatorKind, accumulator_dtype

DIRECTIONS: tuple[Direction, Direction] = ("forward", "backward")
EVERY_TILE = [tile for ranks in (1, 2, 3, 4, 6, 8) for tile in tiles(ranks)]
SHAPES = [Shape(B=1, S=21, H=2, H_kv=2, D=8), Shape(B=2, S=13, H=6, H_kv=2, D=8, D_v=24)]
TYPES = [
    (torch.float64, None),
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]
Flow = tuple[str, str, str]


class Count(NamedTuple):
    messages: int
    num_bytes: int


def call_shape(case: Case) -> CallShape:
    """The sizes of a case as the closed forms know them."""
    exact = accumulator_dtype(case.dtype)
    return CallShape(
        batch=case.shape.B,
        rows=case.chunks.rows,
        heads=case.shape.H,
        kv_heads=case.shape.H_kv,
        head_dim=case.shape.D,
        head_dim_v=case.shape.head_dim_v,
        itemsize=case.dtype.itemsize,
        reduce_itemsize=(case.reduce_dtype or exact).itemsize,
        acc_itemsize=exact.itemsize,
        causal=case.causal,
        key_rows=case.key_chunks.rows,
    )


def formula(case: Case) -> dict[Flow, Count]:
    """What every rank sends, by phase, axis and flow; flows without messages left out."""
    return {
        (direction, axis, way): Count(part.num_messages, part.num_bytes)
        for direction in DIRECTIONS
        for (axis, way), part in traffic(direction, case.tile, call_shape(case)).items()
        if part.num_messages
    }


def counted(records: tuple[TrafficRecord, ...]) -> dict[Flow, Count]:
    assert all(record.sent_bytes == record.received_bytes for record in records), "all ranks hold equal rows"
    return {
        (record.phase, record.axis, record.flow): Count(record.messages, record.sent_bytes)
        for record in records
    }


def _cases(tile: Tile) -> list[Case]:
    return [
        Case(tile, shape, causal=causal, dtype=dtype, reduce_dtype=reduce_dtype)
        for (dtype, reduce_dtype), (shape, causal) in itertools.product(
            TYPES, zip(SHAPES, (True, False), strict=True)
        )
        if shape == SHAPES[1] or dtype == torch.bfloat16
    ]


@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_counters_equal_the_formula(tile: Tile) -> None:
    """For every type, partials in the accumulator's or the input's type, GQA and D_v other than D."""
    cases = _cases(tile)

    def on_rank(group: Any) -> list[dict[Flow, Count]]:
        mesh = ma.init_attention_mesh(group, tile=tile)
        found = []
        for case in cases:
            run_case(mesh, case)
            found.append(counted(mesh.traffic()))
            mesh.reset_traffic()
            assert mesh.traffic() == ()
        return found

    for rank, found in enumerate(run_ranks(tile.ranks, on_rank)):
        for case, flows in zip(cases, found, strict=True):
            assert flows == formula(case), f"{case}, rank {rank}"


def test_formula_of_the_paper() -> None:
    """The closed form by hand, for tile 2x4 of bf16 with GQA: a - 1 = 1 row hop, b - 1 = 3 column hops."""
    case = Case(Tile(2, 4), Shape(B=2, S=80, H=8, H_kv=2, D=16, D_v=32), dtype=torch.bfloat16)
    query_rows, kv_rows, d, d_v, w, m = 2 * 10 * 8, 2 * 10 * 2, 16, 32, 2, 4
    forward = query_rows * (d * w + d_v * m + m) + 3 * kv_rows * (d + d_v) * w
    backward = query_rows * ((d + d_v) * w + d * m + 2 * m) + 3 * kv_rows * (d + d_v) * (w + m)
    sums = {direction: total_bytes(direction, case.tile, call_shape(case)) for direction in DIRECTIONS}
    assert sums == {"forward": forward, "backward": backward}


@pytest.mark.parametrize("tile", [Tile(1, 4), Tile(2, 3), Tile(4, 1)], ids=str)
def test_simulated_sends_carry_what_the_counters_say(tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted again from the buffers that reach the exchange, by rank and by peer."""
    case = Case(tile, SHAPES[1], dtype=torch.bfloat16)
    sent: defaultdict[int, Counter[Flow]] = defaultdict(Counter)
    peers: defaultdict[int, set[int]] = defaultdict(set)
    exchange = ThreadTransport._exchange

    def spy(self: ThreadTransport, message: Message, send: list[Tensor], recv: Tensor) -> Any:
        sent[self.rank][(message.phase, message.axis, message.flow)] += sum(
            x.numel() * x.element_size() for x in send
        )
        peers[self.rank].add(message.to)
        return exchange(self, message, send, recv)

    monkeypatch.setattr(ThreadTransport, "_exchange", spy)

    def on_rank(group: Any) -> dict[Flow, Count]:
        mesh = ma.init_attention_mesh(group, tile=tile)
        run_case(mesh, case)
        return counted(mesh.traffic())

    for rank, found in enumerate(run_ranks(tile.ranks, on_rank)):
        assert sent[rank] == {flow: count.num_bytes for flow, count in found.items()}
        assert len(peers[rank]) == (tile.a > 1) + (tile.b > 1), "the left neighbour of each ring, nobody else"


def test_gloo_sends_carry_what_the_counters_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed from the arguments of torch.distributed's own calls."""
    cases = [Case(tile, SHAPES[1], dtype=torch.bfloat16) for tile in tiles(4)]
    calls: list[tuple[str, int]] = []
    get_backend = dist.ProcessGroup._get_backend

    class Spied:
        def __init__(self, backend: Any) -> None:
            self.supports_coalescing = backend.supports_coalescing
            self._backend = backend

        def _call(self, name: str, tensors: list[Tensor], peer: int, tag: int) -> Any:
            (tensor,) = tensors
            calls.append((name, tensor.numel() * tensor.element_size()))
            return getattr(self._backend, name)(tensors, peer, tag)

        def send(self, *args: Any) -> Any:
            return self._call("send", *args)

        def recv(self, *args: Any) -> Any:
            return self._call("recv", *args)

    monkeypatch.setattr(dist.ProcessGroup, "_get_backend", lambda *args: Spied(get_backend(*args)))

    def on_rank(_: object) -> list[tuple[dict[Flow, Count], Count, int]]:
        answers = []
        for case in cases:
            mesh = ma.init_attention_mesh(tile=case.tile, timeout=60)
            calls.clear()
            run_case(mesh, case)
            sent = [num_bytes for name, num_bytes in calls if name == "send"]
            received = [num_bytes for name, num_bytes in calls if name == "recv"]
            assert len(sent) == len(received)
            answers.append((counted(mesh.traffic()), Count(len(sent), sum(sent)), sum(received)))
        return answers

    for answers in run_ranks(4, on_rank, "gloo"):
        for case, (flows, sums, received) in zip(cases, answers, strict=True):
            assert flows == formula(case)
            messages, num_bytes = (sum(part) for part in zip(*flows.values(), strict=True))
            # The own chunks leave as their tensors: k and v in each pass, and q, do, lse, delta.
            apart = 2 * (case.tile.b > 1) + 3 * (case.tile.a > 1)
            assert sums == (messages + apart, num_bytes) and received == num_bytes


def test_gqa_moves_kv_heads_not_query_heads() -> None:
    """Bytes of a ring grow with H_kv: nothing is repeated before it is sent."""
    few, many = (Case(Tile(1, 4), Shape(B=1, S=16, H=8, H_kv=n, D=8)) for n in (2, 8))

    def on_rank(group: Any) -> list[int]:
        mesh = ma.init_attention_mesh(group, tile=few.tile)
        sums = []
        for case in (few, many):
            run_case(mesh, case)
            sums.append(sum(record.sent_bytes for record in mesh.traffic()))
            mesh.reset_traffic()
        return sums

    for small, large in run_ranks(4, on_rank):
        assert 0 < 4 * small == large


@pytest.mark.parametrize("keys", [None, 31], ids=["own-keys", "other-keys"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=["reduce-exact", "reduce-input"])
@pytest.mark.parametrize("tile", EVERY_TILE, ids=lambda tile: f"P{tile.ranks}-{tile}")
def test_buffers_of_a_pass_equal_the_memory_formula(
    tile: Tile, reduce_dtype: torch.dtype | None, keys: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer that the library makes while a pass runs, summed per rank."""
    shape, kv_layout = replace(SHAPES[1], S_k=keys), None if keys is None else "contiguous"
    case = Case(tile, shape, dtype=torch.bfloat16, reduce_dtype=reduce_dtype, kv_layout=kv_layout)
    made: defaultdict[tuple[int, str], int] = defaultdict(int)
    running = threading.local()

    def counting(make: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            tensor: Tensor = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            flat = tensor.dtype == torch.uint8 or caller == "meshattn.packing"
            if hasattr(running, "key") and caller.startswith("meshattn.") and flat:
                made[running.key] += tensor.numel() * tensor.element_size()
            return tensor

        return wrapper

    def during(direction: str, run: Any) -> Any:
        def wrapper(call: Call, *tensors: Tensor, **named: Any) -> Any:
            running.key = (call.forward.rank, direction)
            kinds: tuple[AccumulatorKind, ...] = ("out",) if direction == "forward" else ("dq", "dkv")
            results = [call.lines[kind].results for kind in kinds]
            made[running.key] -= sum(packing.nbytes for packing in results if packing)  # are no buffers
            try:
                return run(call, *tensors, **named)
            finally:
                del running.key

        return wrapper

    # The memory poison of conftest looks at its caller, which must stay the library: count outside of it.
    monkeypatch.setattr(torch, "empty", counting(torch.empty))
    monkeypatch.setattr(torch, "empty_like", counting(torch.empty_like))
    for direction in DIRECTIONS:
        monkeypatch.setattr(engine, direction, during(direction, getattr(engine, direction)))

    def on_rank(group: Any) -> None:
        run_case(ma.init_attention_mesh(group, tile=tile), case)

    run_ranks(tile.ranks, on_rank)
    for rank, direction in itertools.product(range(tile.ranks), DIRECTIONS):
        found, expected = made[rank, direction], memory(direction, tile, call_shape(case))
        assert found == expected.total, f"rank {rank}, {direction}: {expected}"
