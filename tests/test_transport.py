"""Transports: what arrives, what is counted, and what happens to those who do not keep the rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from distributed import Backend
from meshattn.testing import run_ranks
from meshattn.transport import p2p
from meshattn.transport.base import Message, TrafficRecord, Transport, TransportError
from meshattn.transport.connect import connect
from meshattn.transport.p2p import P2PTransport

CPU = torch.device("cpu")
BACKENDS: list[Backend] = ["threads", "gloo"]
pytestmark = pytest.mark.timeout(60)


def _message(rank: int, ranks: int, label: str = "forward step 0/1, kv #1", axis: str = "col") -> Message:
    """To the left neighbour of a ring, from the right one."""
    return Message("forward", axis, "inward", label, (rank - 1) % ranks, (rank + 1) % ranks)


def _on_ranks(
    ranks: int, backend: Backend, fn: Callable[[Transport, int], Any], timeout: float = 20.0
) -> list[Any]:
    def on_rank(group: Any) -> Any:
        connection = connect(group, timeout)
        return fn(connection.transport, connection.rank)

    return run_ranks(ranks, on_rank, backend, timeout=40)


def _filled(value: int, size: int = 16) -> Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ranks", [1, 2, 3], ids="P{}".format)
def test_a_ring(ranks: int, backend: Backend) -> None:
    """Two exchanges a hop in flight at once; what came is handed on, until all have seen all."""

    def on_rank(transport: Transport, rank: int) -> list[int]:
        slots = transport.buffers("col", "inward", 16, ranks, CPU)
        assert all(slot.shape == (16,) and slot.dtype == torch.uint8 for slot in slots)
        slots[0].fill_(rank)
        for hop in range(1, ranks):
            other = torch.empty(8, dtype=torch.uint8)
            first = transport.start(_message(rank, ranks), [slots[hop - 1]], [slots[hop]])
            second = transport.start(_message(rank, ranks, axis="row"), [_filled(100 + rank, 8)], [other])
            second.wait()
            first.wait()
            first.release()
            assert other.tolist() == [100 + (rank + 1) % ranks] * 8
        return [int(slot[0]) for slot in slots]

    seen = _on_ranks(ranks, backend, on_rank)
    assert seen == [[(rank + hop) % ranks for hop in range(ranks)] for rank in range(ranks)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_tensors_of_an_exchange_arrive_each_in_its_place(backend: Backend) -> None:
    """Of other types and sizes, in one buffer or in several, two exchanges at once; they count as one."""

    def on_rank(transport: Transport, rank: int) -> list[list[float]]:
        (buffer,) = transport.buffers("col", "inward", 18, 1, CPU)
        apart = torch.empty(3, dtype=torch.float64), torch.empty(1, dtype=torch.uint8)
        into = buffer[:12].view(torch.float32), buffer[12:18].view(torch.bfloat16)
        sends = [[torch.full_like(y, rank + at) for at, y in enumerate(parts)] for parts in (into, apart)]
        first, second = (
            transport.start(_message(rank, 3, axis=axis), send, parts)
            for axis, send, parts in zip(("col", "row"), sends, (into, apart), strict=True)
        )
        second.wait()
        first.wait()
        assert [x.messages for x in transport.traffic.records()] == [1, 1]
        assert [x.sent_bytes for x in transport.traffic.records()] == [18, 25]
        return [sorted(set(x.tolist())) for x in (*into, *apart)]

    for rank, found in enumerate(_on_ranks(3, backend, on_rank)):
        source = (rank + 1) % 3
        assert found == [[source], [source + 1]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_gather_is_in_mesh_order(backend: Backend) -> None:
    def on_rank(transport: Transport, rank: int) -> list[list[float]]:
        part = torch.full((2, 3), float(rank)).t()
        return [x.flatten().tolist() for x in transport.all_gather(part)]

    expected = [[float(rank)] * 6 for rank in range(3)]
    assert _on_ranks(3, backend, on_rank) == [expected] * 3


def test_all_gather_on_processes_follows_the_list_of_ranks() -> None:
    members = [2, 0, 1]

    def on_rank(_: object) -> tuple[int, list[float]]:
        connection = connect(members, 20.0)
        parts = connection.transport.all_gather(torch.tensor([float(dist.get_rank())]))
        return connection.rank, [float(part) for part in parts]

    answers = run_ranks(3, on_rank, "gloo")
    assert [answers[member] for member in members] == [(place, [2.0, 0.0, 1.0]) for place in range(3)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_counters(backend: Backend) -> None:
    """Per phase, axis and flow, sent and received apart; the all-gather is no traffic of a pass."""

    def on_rank(transport: Transport, rank: int) -> tuple[TrafficRecord, ...]:
        transport.all_gather(torch.ones(1))
        for axis, size in (("row", 8), ("col", 16), ("row", 8)):
            recv = torch.empty(size, dtype=torch.uint8)
            transport.start(_message(rank, 2, axis=axis), [_filled(1, size)], [recv]).wait()
        records = transport.traffic.records()
        transport.traffic.reset()
        assert transport.traffic.records() == ()
        return records

    expected = (
        TrafficRecord("forward", "col", "inward", 1, 16, 16),
        TrafficRecord("forward", "row", "inward", 2, 16, 16),
    )
    assert _on_ranks(2, backend, on_rank) == [expected, expected]


def test_simulated_receive_buffers_are_poison_until_the_wait() -> None:
    """Who reads early computes with NaN."""

    def on_rank(transport: Transport, rank: int) -> None:
        recv = torch.zeros(16, dtype=torch.uint8)
        handle = transport.start(_message(rank, 2), [_filled(rank)], [recv])
        assert recv.view(torch.float32).isnan().all() and recv.view(torch.float64).isnan().all()
        assert recv.view(torch.bfloat16).isnan().all()
        handle.wait()
        assert recv.tolist() == [1 - rank] * 16

    _on_ranks(2, "threads", on_rank)


def test_overwriting_a_simulated_send_buffer_spoils_what_arrives() -> None:
    """The bytes are read from the sender's own memory when the receiver waits, as late as a network may."""

    def on_rank(transport: Transport, rank: int) -> int:
        send, recv = _filled(7), torch.zeros(16, dtype=torch.uint8)
        handle = transport.start(_message(rank, 2), [send], [recv])
        if rank == 0:
            send.fill_(9)
        transport.all_gather(torch.zeros(1))  # both have started, and rank 0 has spoilt its buffer
        handle.wait()
        return int(recv[0])

    assert _on_ranks(2, "threads", on_rank) == [7, 9]


def test_a_simulated_wait_is_a_rendezvous() -> None:
    """A send is not done before the peer has taken it: nothing is buffered."""

    def on_rank(transport: Transport, rank: int) -> float:
        begin = time.monotonic()
        handle = transport.start(_message(rank, 2), [_filled(1)], [torch.empty(16, dtype=torch.uint8)])
        if rank == 1:
            time.sleep(0.5)
        handle.wait()
        return time.monotonic() - begin

    assert min(_on_ranks(2, "threads", on_rank)) >= 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_that_do_not_take_place(backend: Backend) -> None:
    """Rank 0 sends nothing in the first exchange and rank 2 none in the second; all are whole afterwards."""

    def on_rank(transport: Transport, rank: int) -> tuple[list[int], tuple[TrafficRecord, ...]]:
        found = []
        for number, silent in enumerate((0, 2, None)):
            recv = torch.zeros(16, dtype=torch.uint8)
            send = None if rank == silent else [_filled(10 * number + rank)]
            transport.start(_message(rank, 3), send, None if (rank + 1) % 3 == silent else [recv]).wait()
            found.append(int(recv[0]))
        nothing = transport.start(_message(rank, 3), None, None)
        nothing.wait()
        nothing.release()
        return found, transport.traffic.records()

    answers = _on_ranks(3, backend, on_rank)
    assert [found for found, _ in answers] == [[1, 11, 21], [2, 0, 22], [0, 10, 20]]
    counts = [(2, 32, 48), (3, 48, 32), (2, 32, 32)]
    for (_, records), (messages, sent, received) in zip(answers, counts, strict=True):
        assert records == (TrafficRecord("forward", "col", "inward", messages, sent, received),)


def test_connections_of_one_simulated_group_do_not_mix() -> None:
    """Also if the ranks start their exchanges in different orders."""

    def on_rank(group: Any) -> list[int]:
        first, second = (connect(group, 10.0).transport for _ in range(2))
        received = [torch.empty(16, dtype=torch.uint8) for _ in range(2)]
        order = (0, 1) if group.rank == 0 else (1, 0)
        handles = {}
        for n in order:
            send = [_filled(10 * n + group.rank)]
            handles[n] = (first, second)[n].start(_message(group.rank, 2), send, [received[n]])
        for n in (0, 1):
            handles[n].wait()
        return [int(x[0]) for x in received]

    assert run_ranks(2, on_rank) == [[1, 11], [0, 10]]


def test_a_size_that_does_not_match_is_named() -> None:
    def on_rank(transport: Transport, rank: int) -> str:
        size = 8 if rank == 0 else 16
        handle = transport.start(_message(rank, 2), [_filled(1, size)], [torch.empty(16, dtype=torch.uint8)])
        if rank == 0:
            with pytest.raises(TransportError, match=r"the run has ended|nothing from rank 1|has failed"):
                handle.wait()
            return ""
        with pytest.raises(TransportError) as info:
            handle.wait()
        return str(info.value)

    text = _on_ranks(2, "threads", on_rank, timeout=0.5)[1]
    assert text == "forward step 0/1, kv #1: rank 1 expected 16 bytes from rank 0, which sent 8"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_peer_that_never_comes_is_named(backend: Backend) -> None:
    def on_rank(transport: Transport, rank: int) -> str:
        if rank == 1:
            time.sleep(2)
            return ""
        handle = transport.start(_message(0, 2), [_filled(1)], [torch.empty(16, dtype=torch.uint8)])
        with pytest.raises(TransportError) as info:
            handle.wait()
        return str(info.value)

    text = _on_ranks(2, backend, on_rank, timeout=1.0)[0]
    assert text.startswith("forward step 0/1, kv #1: ") and "rank 1" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_with_gaps_are_refused(backend: Backend) -> None:
    def on_rank(transport: Transport, rank: int) -> None:
        gaps = torch.zeros(16, dtype=torch.uint8)[::2]
        with pytest.raises(AssertionError, match="kv #1"):
            transport.start(_message(rank, 2), [gaps], [gaps])
        assert transport.traffic.records() == ()

    _on_ranks(2, backend, on_rank)


def test_a_backend_that_can_starts_both_halves_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL needs it: two ranks that send to each other one after the other would both wait."""
    calls: list[Any] = []

    class Backend:
        supports_coalescing = True

        def _start_coalescing(self) -> None:
            calls.append("start")

        def send(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            calls.append(("send", int(tensors[0][0]), peer))

        def recv(self, tensors: list[Tensor], peer: int, tag: int) -> None:
            calls.append(("recv", int(tensors[0][0]), peer))

        def _end_coalescing(self) -> Any:
            calls.append("end")
            return SimpleNamespace(wait=lambda: calls.append("wait"))

    monkeypatch.setattr(P2PTransport, "uses_nccl", False)
    group = SimpleNamespace(_get_backend=lambda device: Backend())
    transport = P2PTransport(group, [7, 5, 6], [0, 1, 2], 3.0)  # type: ignore[arg-type]
    transport.start(_message(1, 3), [_filled(8), _filled(9)], [_filled(3), _filled(4)]).wait()
    halves = [("send", 8, 7), ("send", 9, 7), ("recv", 3, 6), ("recv", 4, 6)]
    assert calls == ["start", *halves, "end", "wait"]
    transport.start(_message(1, 3), None, None).wait()
    assert len(calls) == 7
    # What NCCL may write to lives until it is waited for, also if a pass breaks off before that.
    waited, never = _filled(1), _filled(2)
    memory = [StorageWeakRef(buffer.untyped_storage()) for buffer in (waited, never)]
    transport.start(_message(1, 3), None, [waited]).wait()
    transport.start(_message(1, 3), None, [never])
    del waited, never
    assert [buffer.expired() for buffer in memory] == [True, False]


def test_a_close_that_graphs_hold_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(P2PTransport, "uses_nccl", False)
    monkeypatch.setattr(p2p, "_GRAPH_GRACE", 0.2)
    monkeypatch.setattr(p2p, "end_group", lambda group: released.wait(20))
    transport = P2PTransport(SimpleNamespace(), [0], [0], 3.0)  # type: ignore[arg-type]
    transport._nccl = SimpleNamespace(captured=True, close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"CUDA graphs .* reset\(\), before mesh\.close\(\)"):
        transport.close()
    released.set()
    transport.close()


def test_what_a_connection_says_of_itself() -> None:
    def simulated(group: Any) -> tuple[int, int, tuple[int, ...], str]:
        connection = connect(group, 5.0)
        assert "simulated" in connection.reason
        return connection.rank, connection.size, connection.names, connection.transport.name

    assert run_ranks(2, simulated) == [(rank, 2, (0, 1), "threads") for rank in range(2)]

    def processes(_: object) -> tuple[int, int, tuple[int, ...], str]:
        connection = connect([2, 1], 20.0) if dist.get_rank() else connect([0], 20.0)
        return connection.rank, connection.size, connection.names, connection.transport.name

    assert run_ranks(3, processes, "gloo") == [
        (0, 1, (0,), "p2p"),
        (1, 2, (2, 1), "p2p"),
        (0, 2, (2, 1), "p2p"),
    ]
