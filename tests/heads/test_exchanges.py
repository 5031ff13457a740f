"""What the exchanges of a head axis move and keep, beside what they run, and who is named when one fails."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from distributed import build_mesh, run_case, run_cases
from head_cases import GROUPED, SHAPE, Axes, axes_id, formula, head_case, outside_shape
from meshattn import engine, heads
from meshattn.plan.heads import exchange_memory, head_groups
from meshattn.program import Call
from meshattn.testing import run_ranks
from meshattn.transport.base import Message
from meshattn.transport.threads import ThreadTransport
from test_traffic import DIRECTIONS, Count, Flow, call_shape, counted

TRAFFIC = [(1, 2, 2), (2, 1, 1), (4, 1, 1), (2, 2, 1), (3, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize("axes", TRAFFIC, ids=axes_id)
def test_counters_equal_the_formula(axes: Axes, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the bytes that are handed to the exchanges, counted again."""
    cases = [
        head_case(axes, replace(SHAPE, S_k=S_k), dtype=dtype, reduce_dtype=reduce_dtype, kv_layout=kv_layout)
        for dtype, reduce_dtype in (
            (torch.float64, None),
            (torch.bfloat16, None),
            (torch.bfloat16, torch.bfloat16),
        )
        for S_k, kv_layout in ((None, None), (41, "contiguous"))
    ]
    if axes[0] == 2:
        cases += [head_case(axes, GROUPED, head_groups=groups, causal=False) for groups in (1, 2, 4)]
    sent: defaultdict[int, Counter[Flow]] = defaultdict(Counter)
    exchange = ThreadTransport._exchange

    def spy(self: ThreadTransport, message: Message, send: Sequence[Tensor], recv: Tensor) -> Any:
        sent[self.rank][message.phase, message.axis, message.flow] += sum(part.nbytes for part in send)
        return exchange(self, message, send, recv)

    monkeypatch.setattr(ThreadTransport, "_exchange", spy)

    def on_rank(group: Any) -> list[dict[Flow, Count]]:
        found = []
        for case in cases:
            mesh = build_mesh(group, case)
            sent[mesh.rank].clear()
            run_case(mesh, case)
            found.append(counted(mesh.traffic()))
            assert sent[mesh.rank] == {flow: count.num_bytes for flow, count in found[-1].items()}
        return found

    for rank, found in enumerate(run_ranks(cases[0].ranks, on_rank)):
        for case, flows in zip(cases, found, strict=True):
            assert flows == formula(case), f"{case}, rank {rank}"


@pytest.mark.parametrize("groups", [1, 2, 4], ids="groups{}".format)
def test_messages_take_the_memory_of_the_formula(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most bytes in use at once, of all buffers of the head axis: receive buffers for a pass, what is
    sent until its exchange is released."""
    case = head_case((2, 1, 2), GROUPED, dtype=torch.bfloat16, head_groups=groups)
    here = threading.local()
    most: dict[str, int] = {}
    in_rows, received = heads._in_rows, ThreadTransport.received

    def made(num_bytes: int) -> None:
        here.bytes += num_bytes
        here.most = max(here.most, here.bytes)

    def sending(part: Any) -> tuple[Tensor, ...]:
        sent = in_rows(part)
        pairs = zip(sent, part.values(), strict=True)
        made(sum(x.nbytes for x, given in pairs if x.data_ptr() != given.data_ptr()))
        return sent

    def receiving(self: ThreadTransport, axis: str, *arguments: Any) -> Any:
        packed = received(self, axis, *arguments)
        if axis == "heads":
            made(sum(x.flat.nbytes for x in packed))
        return packed

    def during(direction: str, run: Any) -> Any:
        def wrapper(call: heads.HeadCall, *tensors: Any) -> Any:
            here.bytes = here.most = 0
            result = run(call, *tensors)
            assert most.setdefault(direction, here.most) == here.most, "the same on every rank"
            return result

        return wrapper

    class Watched(heads._AllToAll):
        def start(self, group: int, parts: Any) -> None:
            before = here.bytes
            super().start(group, parts)
            self.sent = here.bytes - before

        def release(self) -> None:
            super().release()
            here.bytes -= self.sent

    monkeypatch.setattr(heads, "_in_rows", sending)
    monkeypatch.setattr(ThreadTransport, "received", receiving)
    monkeypatch.setattr(heads, "_AllToAll", Watched)
    for direction in DIRECTIONS:
        monkeypatch.setattr(heads, direction, during(direction, getattr(heads, direction)))
    run_cases([case])
    assert most == {
        direction: exchange_memory(direction, outside_shape(case), 2, groups) for direction in DIRECTIONS
    }


def test_exchanges_run_beside_the_attention_of_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the start and the end of an exchange lies the attention of a group, but for the first one in
    and the last one out; both ways and in both passes."""
    case = head_case((2, 1, 1), GROUPED, head_groups=4)
    log: list[str] = []

    def spy(owner: Any, name: str, words: Any) -> None:
        run = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "first":
                log.append(words(*args))
            return run(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    spy(heads._AllToAll, "start", lambda self, group, parts: f"{self._direction} {self._way} {group}")
    spy(heads._AllToAll, "finish", lambda self: f"{self._direction} {self._way} end")
    for direction in DIRECTIONS:
        spy(engine, direction, lambda *args, name=direction: f"{name} computed")

    def on_rank(group: Any) -> None:
        mesh = build_mesh(group, case)
        if mesh.rank == 0:
            threading.current_thread().name = "first"
        run_case(mesh, case)

    run_ranks(2, on_rank)
    for direction in DIRECTIONS:
        events = [event for event in log if event.startswith(direction)]
        for way, exposed in (("inward", 0), ("outward", 3)):
            ends = [place for place, event in enumerate(events) if event == f"{direction} {way} end"]
            for group in range(4):
                between = events[events.index(f"{direction} {way} {group}") : ends[group]]
                assert between.count(f"{direction} computed") == (group != exposed), f"{way} of group {group}"


@pytest.mark.parametrize("groups", [1, 2, 4], ids="groups{}".format)
def test_transports_are_told_of_attention_beside_them(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each group of both passes, where there is another one that moves meanwhile."""
    told: list[int] = []
    monkeypatch.setattr(ThreadTransport, "compute_follows", lambda self: told.append(self.rank))
    run_cases([head_case((2, 1, 1), GROUPED, head_groups=groups)])
    assert sorted(told) == ([0] * 2 * groups + [1] * 2 * groups if groups > 1 else [])


@pytest.mark.parametrize("taken", [0, 16], ids="{}-multiprocessors".format)
def test_no_groups_where_exchanges_take_multiprocessors(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadTransport, "multiprocessors", taken)
    shape = replace(call_shape(head_case((2, 1, 1), GROUPED)), rows=2**20, key_rows=2**20)

    def on_rank(group: Any) -> int:
        return ma.init_attention_mesh(group, heads=2).split_heads(shape, torch.device("cpu"))[1]

    assert run_ranks(2, on_rank) == [1 if taken else head_groups(shape, 2)] * 2
    assert head_groups(shape, 2) == 4


def test_a_rank_that_fails_is_named_with_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.forward

    def broken(call: Call, *tensors: Any) -> Any:
        if threading.current_thread().name == "victim":
            raise RuntimeError("trouble of its own")
        return forward(call, *tensors)

    monkeypatch.setattr(engine, "forward", broken)

    def on_rank(group: Any) -> None:
        if group.rank == 1:
            threading.current_thread().name = "victim"
        run_case(build_mesh(group, case), case)

    case = head_case((3, 1, 1))
    first, victim, last = run_ranks(3, on_rank, return_exceptions=True)
    assert str(victim) == "trouble of its own"
    for other in (first, last):
        # Which exchange, and with whom, depends on who looks first; why does not.
        assert str(other).startswith("forward head group 1/1, ") and ": no exchange with rank " in str(other)
        assert "rank 1 has failed (RuntimeError: trouble of its own)" in str(other)
