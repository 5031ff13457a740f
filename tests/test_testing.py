"""run_ranks: results in rank order, closures everywhere, failures told, no hang."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import Backend
from meshattn.testing import RankError, run_ranks
from meshattn.transport.base import TransportError
from meshattn.transport.threads import SimulatedGroup, SimulatedWorld

BACKENDS: list[Backend] = ["threads", "gloo"]
pytestmark = pytest.mark.timeout(60)


def _rank(group: Any) -> int:
    return group.rank if isinstance(group, SimulatedGroup) else dist.get_rank()


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_come_in_rank_order(backend: Backend) -> None:
    """Also of a closure, and when the first rank ends last."""
    offset = torch.tensor([10])

    def on_rank(group: Any) -> torch.Tensor:
        rank = _rank(group)
        time.sleep(0.2 if rank == 0 else 0.0)
        return offset + rank

    assert [int(x) for x in run_ranks(3, on_rank, backend)] == [10, 11, 12]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks at threads as Linux shows them")
def test_threads_have_ended_for_the_system_too() -> None:
    """A library may take a while, and a lock, when a thread ends: here the C library sleeps."""
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    destructor = ctypes.cast(libc.usleep, ctypes.c_void_p)
    assert libc.pthread_key_create(ctypes.byref(key), destructor) == 0

    def on_rank(_: object) -> int:
        libc.pthread_setspecific(key, ctypes.c_void_p(300_000))
        return threading.get_native_id()

    tasks = run_ranks(3, on_rank)
    assert len(set(tasks)) == 3
    assert not [task for task in tasks if Path(f"/proc/self/task/{task}").exists()]


def test_processes_get_the_default_group() -> None:
    def on_rank(group: Any) -> float:
        assert group is dist.group.WORLD and dist.get_world_size() == 3 and os.getpid() != parent
        assert torch.get_num_threads() == 1
        total = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(total)
        return float(total)

    parent = os.getpid()
    assert run_ranks(3, on_rank, "gloo") == [3.0] * 3
    assert not dist.is_initialized(), "this process is untouched"


def test_large_results_come_back() -> None:
    def on_rank(_: object) -> torch.Tensor:
        return torch.full((1 << 20,), float(dist.get_rank()))

    for rank, result in enumerate(run_ranks(2, on_rank, "gloo")):
        assert result.shape == (1 << 20,) and bool((result == rank).all())


class _OwnError(Exception):
    pass


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cause_is_raised_not_its_echo(backend: Backend) -> None:
    def on_rank(group: Any) -> None:
        if _rank(group) == 2:
            raise _OwnError("the cause")
        raise TransportError("an echo")

    with pytest.raises(_OwnError, match="the cause"):
        run_ranks(3, on_rank, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exceptions_as_results(backend: Backend) -> None:
    def on_rank(group: Any) -> str:
        if _rank(group) == 1:
            raise _OwnError("only here")
        return "fine"

    first, second, third = run_ranks(3, on_rank, backend, return_exceptions=True)
    assert first == third == "fine"
    assert isinstance(second, _OwnError) and str(second) == "only here"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_does_not_end_is_given_up(backend: Backend) -> None:
    def on_rank(group: Any) -> str:
        if _rank(group) == 0:
            time.sleep(6)
        return "fine"

    begin = time.monotonic()
    first, second = run_ranks(2, on_rank, backend, timeout=1.5, return_exceptions=True)
    assert time.monotonic() - begin < 5
    assert isinstance(first, RankError) and "did not finish in time" in str(first)
    assert second == "fine"


def test_a_process_that_dies_is_told() -> None:
    def on_rank(_: object) -> None:
        if dist.get_rank() == 1:
            os._exit(7)

    with pytest.raises(RankError, match="rank 1 died"):
        run_ranks(2, on_rank, "gloo")


def test_a_result_that_cannot_be_sent_back_is_told() -> None:
    def on_rank(_: object) -> Any:
        return (lambda: None) if dist.get_rank() == 0 else 1

    first, second = run_ranks(2, on_rank, "gloo", return_exceptions=True)
    assert isinstance(first, RankError) and "rank 0" in str(first) and "cannot be sent back" in str(first)
    assert second == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_rank(backend: Backend) -> None:
    assert run_ranks(1, _rank, backend) == [0]


def test_unknown_backends_and_empty_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="backend='mpi' is unknown: use 'threads' or 'gloo'"):
        run_ranks(2, _rank, "mpi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        SimulatedWorld(0)


def test_runs_may_follow_and_nest() -> None:
    """A simulated group inside a rank of another, and a new process group after an old one."""

    def on_rank(group: Any) -> list[int]:
        return [10 * _rank(group) + inner for inner in run_ranks(2, _rank)]

    for backend in BACKENDS:
        assert run_ranks(2, on_rank, backend) == [[0, 1], [10, 11]]
        assert run_ranks(2, on_rank, backend) == [[0, 1], [10, 11]]
