"""A rank that dies, stalls or raises: the others raise within the timeout, naming the step and the peer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshattn as ma
from distributed import Backend
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Assignment, Tile
from meshattn.testing import RankError, run_ranks
from meshattn.transport.base import Message, TransportError
from meshattn_kernels.reference import ReferenceKernel

TIMEOUT = 1.5
VICTIM = 2
PHASES = ("forward", "backward")
pytestmark = pytest.mark.timeout(60)


def _attend(mesh: AttentionMesh) -> torch.Tensor:
    seq = mesh.sequence(13)
    q, k, v = (torch.ones(1, seq.rows, 2, 8, requires_grad=True) for _ in range(3))
    out = ma.mesh_attention(q, k, v, seq)
    assert isinstance(out, torch.Tensor)
    out.sum().backward()
    return out


def _at_block(phase: str, number: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let ``action`` happen at the n-th block of the phase of an armed rank; returns what arms it."""
    armed = threading.local()
    compute = getattr(ReferenceKernel, phase)

    def wrapper(self: ReferenceKernel, *args: Any, **options: Any) -> Any:
        if hasattr(armed, "blocks"):
            armed.blocks += 1
            if armed.blocks == number:
                action()
        return compute(self, *args, **options)

    monkeypatch.setattr(ReferenceKernel, phase, wrapper)

    def arm() -> None:
        armed.blocks = 0

    return arm


def _peers(tile: Tile, rank: int) -> set[int]:
    assignment = Assignment(tile)
    return {assignment.neighbour(rank, axis, n) for axis in ("row", "col") for n in (-1, 1)} - {rank}


def _outcomes(
    tile: Tile, arm: Callable[[], None], backend: Backend, timeout: float = TIMEOUT
) -> tuple[list[Any], float]:
    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, tile=tile, timeout=timeout)
        _attend(mesh)
        if mesh.rank == VICTIM:
            arm()
        _attend(mesh)
        return "finished"

    begin = time.monotonic()
    outcomes = run_ranks(tile.ranks, on_rank, backend, timeout=30, return_exceptions=True)
    return outcomes, time.monotonic() - begin


def _assert_named(tile: Tile, outcomes: list[Any], phase: str) -> None:
    """The survivors name the step, the transfer and a peer; a neighbour of the victim names the victim."""
    named = 0
    for rank, outcome in enumerate(outcomes):
        if rank == VICTIM:
            continue
        assert isinstance(outcome, TransportError), f"rank {rank}: {outcome!r}"
        text = str(outcome)
        assert any(text.startswith(f"{name} step ") for name in PHASES[PHASES.index(phase) :]), text
        assert "#" in text, "names the transfer"
        assert any(f"rank {peer}" in text for peer in _peers(tile, rank)), text
        named += f"rank {VICTIM}" in text
    assert named, "no rank names the one that is gone"


@pytest.mark.parametrize(
    "kill", [lambda: os._exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL)], ids=["exit", "sigkill"]
)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("tile", [Tile(1, 4), Tile(2, 2)], ids=str)
def test_a_killed_process(
    tile: Tile, phase: str, kill: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = _at_block(phase, 2, kill, monkeypatch)
    outcomes, seconds = _outcomes(tile, arm, "gloo")
    assert isinstance(outcomes[VICTIM], RankError) and f"rank {VICTIM} died" in str(outcomes[VICTIM])
    _assert_named(tile, outcomes, phase)
    assert seconds < 25


@pytest.mark.parametrize("phase", PHASES)
def test_a_stalled_process(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile(2, 2)
    arm = _at_block(phase, 2, lambda: time.sleep(2.5 * TIMEOUT), monkeypatch)
    outcomes, seconds = _outcomes(tile, arm, "gloo")
    _assert_named(tile, outcomes, phase)
    assert isinstance(outcomes[VICTIM], TransportError), "it finds the others gone when it wakes"
    assert seconds < 25


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("tile", [Tile(1, 4), Tile(2, 2)], ids=str)
def test_a_stalled_thread(tile: Tile, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = _at_block(phase, 2, lambda: time.sleep(2.5), monkeypatch)
    outcomes, seconds = _outcomes(tile, arm, "threads", timeout=1.0)
    _assert_named(tile, outcomes, phase)
    # One that waits for a rank that waits for the victim may be the first to give up, which ends the rest.
    gave_up = [
        f"nothing from rank {peer} within 1 s" in str(outcome)
        for rank, outcome in enumerate(outcomes)
        for peer in _peers(tile, rank)
    ]
    assert any(gave_up), "by its own clock"
    assert seconds < 10


class _Broken(RuntimeError):
    pass


def _break() -> None:
    raise _Broken("this rank's own trouble")


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_raises_inside_the_pass(
    phase: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = _at_block(phase, 2, _break, monkeypatch)
    outcomes, _ = _outcomes(Tile(2, 2), arm, backend)
    assert isinstance(outcomes[VICTIM], _Broken)
    _assert_named(Tile(2, 2), outcomes, phase)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_rank_that_raises_between_two_calls(backend: Backend) -> None:
    """run_ranks shows that rank's own exception, not the echo in the others."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, tile=(2, 2), timeout=TIMEOUT)
        for _ in range(2):
            _attend(mesh)
        if mesh.rank == VICTIM:
            _break()
        _attend(mesh)

    with pytest.raises(_Broken, match="own trouble"):
        run_ranks(4, on_rank, backend, timeout=30)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_rank_that_never_builds_the_mesh(backend: Backend) -> None:
    def on_rank(group: Any) -> Any:
        rank = group.rank if backend == "threads" else torch.distributed.get_rank()
        if rank == VICTIM:
            time.sleep(2)
            return None
        with pytest.raises(Exception) as info:  # gloo's own error where the connection cannot be made
            ma.init_attention_mesh(group, tile=(1, 3), timeout=1.0)
        return str(info.value)

    first, second, _ = run_ranks(3, on_rank, backend, timeout=30)
    if backend == "threads":
        for text in (first, second):
            assert "rank 2 did not come to it within 1 s, only ranks 0, 1 did" in text


def test_labels_name_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every message of both passes: phase, step of how many, payload and its number."""
    from meshattn.transport.threads import ThreadTransport

    seen: list[Message] = []
    exchange = ThreadTransport._exchange

    def spy(self: ThreadTransport, message: Message, *buffers: Any) -> Any:
        seen.append(message)
        return exchange(self, message, *buffers)

    monkeypatch.setattr(ThreadTransport, "_exchange", spy)
    run_ranks(4, lambda group: _attend(ma.init_attention_mesh(group, tile=(2, 2))))
    payloads = {message.label.split(", ")[1] for message in seen}
    assert payloads == {"q #1", "kv #1", "out #1", "bundle #1", "dq #1", "dkv #1"}
    assert all(message.label.startswith(f"{message.phase} step ") for message in seen)
