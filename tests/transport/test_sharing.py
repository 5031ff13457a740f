"""Blocks beside a transfer that takes multiprocessors run on a kernel that leaves them."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cases import Shape
from distributed import assert_equals_oracle, run_cases
from mesh_cases import Case
from meshattn import calls
from meshattn.plan.assignment import Tile
from meshattn.plan.cost import CallShape, Room, costs, delay_units, room_for
from meshattn.plan.schedule import Direction
from meshattn.transport.threads import ThreadTransport
from meshattn_kernels.reference import ReferenceKernel
from meshattn_kernels.sharing import among, delay_some, leave_room, patient

CUDA = torch.device("cuda", 0)
DIRECTIONS: dict[Direction, Room] = {"forward": "at first", "backward": "none"}


@dataclass(frozen=True)
class Counting(ReferenceKernel):
    workers: int | None = None


def test_a_kernel_leaves_room_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert leave_room(Counting(), CUDA, 16) == Counting(workers=116)
    assert leave_room(Counting(workers=40), CUDA, 16) == Counting(workers=24)
    assert leave_room(Counting(workers=3), CUDA, 16) == Counting(workers=1)
    plain = ReferenceKernel()
    assert leave_room(plain, CUDA, 16) is plain
    for same in ((Counting(), CUDA, 0), (Counting(), torch.device("cpu"), 16)):
        assert leave_room(*same) is same[0]


def test_a_kernel_is_told_which_workers_begin_late_where_it_can_be() -> None:
    @dataclass(frozen=True)
    class Told(ReferenceKernel):
        delay: tuple[int, int] = (0, 0)

    assert delay_some(Told(), CUDA, 16, 9) == Told(delay=(16, 9))
    plain = ReferenceKernel()
    assert delay_some(plain, CUDA, 16, 9) is plain
    for same in ((Told(), CUDA, 0, 9), (Told(), CUDA, 16, 0), (Told(), torch.device("cpu"), 16, 9)):
        assert delay_some(*same) is same[0]


@dataclass(frozen=True)
class Waiting(ReferenceKernel):
    patience: float = 10.0


def test_a_kernel_is_told_how_long_to_wait_where_it_waits() -> None:
    assert patient(Waiting(), 90.0) == Waiting(patience=90.0)
    plain = ReferenceKernel()
    assert patient(plain, 90.0) is plain


@pytest.mark.parametrize("multiprocessors", [0, 16])
def test_kernels_wait_longer_than_the_transport_that_holds_their_multiprocessors(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    timeout = 50.0

    def told(kernel: ReferenceKernel, seconds: float) -> ReferenceKernel:
        waited.append(seconds)
        return kernel

    monkeypatch.setattr(ThreadTransport, "multiprocessors", multiprocessors)
    monkeypatch.setattr(calls, "patient", told)
    case = Case(Tile(1, 3), Shape(B=1, S=19, H=2, H_kv=1, D=8), causal=True)
    (by_rank,) = run_cases([case], timeout=timeout, kernel="reference")
    assert_equals_oracle(case, by_rank)
    assert bool(waited) == bool(multiprocessors)
    assert all(seconds > timeout for seconds in waited)


def test_ranks_that_share_a_gpu_share_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert among(Counting(), CUDA, 4) == Counting(workers=33)
    assert among(Counting(workers=40), CUDA, 3) == Counting(workers=13)
    assert among(Counting(), CUDA, 200) == Counting(workers=1)
    for same in ((Counting(), CUDA, 1), (Counting(), torch.device("cpu"), 4), (ReferenceKernel(), CUDA, 4)):
        assert among(*same) is same[0]
    assert among(Counting(), CUDA, 4, 16) == Counting(workers=17)
    assert among(Counting(), CUDA, 16, 16) == Counting(workers=1)


def test_long_blocks_take_all_and_short_ones_share() -> None:
    def shape(rows: int) -> CallShape:
        return CallShape(1, rows, 16, 16, 128, 128, 2, 4, 4, causal=True)

    for direction, long in DIRECTIONS.items():
        assert room_for(direction, shape(2048), Tile(1, 2)) == "all along"
        assert room_for(direction, shape(2**20), Tile(1, 2)) == long
        assert room_for(direction, shape(2048), Tile(1, 1)) == long, "nothing moves"


def test_a_transfer_takes_part_of_a_long_block_and_never_more_than_all() -> None:
    shape = CallShape(1, 32768, 16, 16, 128, 128, 2, 4, 4, causal=True)
    cost = costs("forward", shape)
    units = delay_units(cost.of("kv"), cost.block)
    assert 64 * cost.of("kv") / cost.block < units < 64 * cost.of("kv") / cost.block * 3
    assert delay_units(0, cost.block) == delay_units(-5, cost.block) == 0
    assert delay_units(cost.block, cost.block) == 64


def test_what_a_long_block_counts_on_is_what_blocks_before_it_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[int, int]] = []

    def units(moving: int, block: int) -> int:
        told.append((moving, block))
        return delay_units(moving, block)

    monkeypatch.setattr(ThreadTransport, "multiprocessors", 16)
    monkeypatch.setattr(calls, "room_for", lambda *_: "at first")
    monkeypatch.setattr(calls, "delay_units", units)
    case = Case(Tile(2, 2), Shape(B=1, S=203, H=2, H_kv=2, D=8), causal=False)
    (by_rank,) = run_cases([case], kernel="reference")
    assert_equals_oracle(case, by_rank)
    moved = {
        cost.of(payload)
        for direction, payloads in (
            ("forward", ("q", "kv", "out")),
            ("backward", ("bundle", "kv", "dq", "dkv")),
        )
        for cost in [costs(direction, CallShape(1, 51, 2, 2, 8, 8, 8, 8, 8, causal=False))]
        for payload in payloads
    }
    assert told and {moving for moving, _ in told} <= moved | {
        moving - block for moving in moved for _, block in told
    }


@pytest.mark.parametrize("tile", [Tile(1, 3), Tile(2, 2), Tile(1, 1)], ids=str)
def test_blocks_beside_transfers_use_the_kernel_that_leaves_room(
    tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: defaultdict[str, list[bool]] = defaultdict(list)
    lock = threading.Lock()

    @dataclass(frozen=True)
    class Roomy(ReferenceKernel):
        def forward(self, *args: Any, **options: Any) -> None:
            with lock:
                seen["forward"].append(True)
            super().forward(*args, **options)

    compute = ReferenceKernel.forward

    def forward(self: ReferenceKernel, *args: Any, **options: Any) -> None:
        if not isinstance(self, Roomy):
            with lock:
                seen["forward"].append(False)
        compute(self, *args, **options)

    monkeypatch.setattr(ReferenceKernel, "forward", forward)
    monkeypatch.setattr(ThreadTransport, "multiprocessors", 16)
    monkeypatch.setattr(calls, "leave_room", lambda kernel, device, n: Roomy() if n == 16 else kernel)
    case = Case(tile, Shape(B=1, S=19, H=2, H_kv=1, D=8), causal=False)
    (by_rank,) = run_cases([case], kernel="reference")
    assert_equals_oracle(case, by_rank)
    beside = seen["forward"].count(True)
    assert beside == 0 if tile.ranks == 1 else 0 < beside < tile.ranks * tile.ranks
    assert len(seen["forward"]) == tile.ranks * tile.ranks
