"""Run a function on all ranks of a group, in this process or in several: for our tests and for users'."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from meshattn.transport.base import TransportError
from meshattn.transport.threads import SimulatedGroup, SimulatedWorld

Result = TypeVar("Result")
_FORKED_AUTOGRAD = "autograd's threading in combination with fork"


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""


def run_ranks(
    ranks: int,
    fn: Callable[[Any], Result],
    backend: Literal["threads", "gloo"] = "threads",
    *,
    timeout: float = 60.0,
    return_exceptions: bool = False,
) -> list[Result]:
    """Call ``fn(group)`` on every rank and return the results in rank order.

    Args:
        ranks: size of the group.
        fn: any callable, closures too; under "gloo" its result must be picklable (tensors are).
        backend: "threads" simulates the group in this process; "gloo" forks one process a rank and passes
            the default group.
        timeout: seconds for the whole run, and for every wait of the gloo group.
        return_exceptions: put exceptions into the list instead of raising the first one that is not the
            echo of another rank's failure; a rank that died gives a RankError.
    """
    if backend == "threads":
        results = _run_threads(ranks, fn, timeout)
    elif backend == "gloo":
        results = _run_processes(ranks, fn, timeout)
    else:
        raise ValueError(f"backend={backend!r} is unknown: use 'threads' or 'gloo'")
    if not return_exceptions:
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next(
                (failure for failure in failures if not isinstance(failure, TransportError)), failures[0]
            )
    return results


def _run_threads(ranks: int, fn: Callable[[SimulatedGroup], Any], timeout: float) -> list[Any]:
    world = SimulatedWorld(ranks)
    results: list[Any] = [RankError("the rank did not finish in time") for _ in range(ranks)]

    def run(group: SimulatedGroup) -> None:
        try:
            # Autograd would otherwise run all ranks' GPU backward passes on one thread, where they wait for
            # each other.
            with torch.autograd.set_multithreading_enabled(False):
                results[group.rank] = fn(group)
        except BaseException as error:
            results[group.rank] = error
            world.abort(f"rank {group.rank} has failed ({type(error).__name__}: {error})")

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in world.groups()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    world.abort("the run has ended")
    _see_off([thread for thread in threads if not thread.is_alive()], deadline)
    return results


def _see_off(threads: Sequence[threading.Thread], deadline: float) -> None:
    """Wait for the end of threads that have been joined: before Python 3.13 they may still be in their last
    moments, in which MKL takes a lock, and a process that is forked meanwhile never gets it."""
    for thread in threads:
        task = Path(f"/proc/self/task/{thread.native_id}")  # of Linux
        while task.exists() and time.monotonic() < deadline:
            time.sleep(0.001)


def _run_processes(ranks: int, fn: Callable[[Any], Any], timeout: float) -> list[Any]:
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, rank, ranks, fn, timeout), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    # The parent hosts the store, so that it outlives every rank; but only now, because a fork beside the busy
    # threads of a store may copy a lock that nobody will ever open.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for pipe in pipes:
        pipe.send(store.port)
    results = _collect(pipes, timeout)
    for process in processes:
        process.join(1.0)
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: list[Any] = [RankError("the rank did not finish in time") for _ in pipes]
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                results[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
            except EOFError:
                results[rank] = RankError(f"rank {rank} died without an answer")
            except Exception as error:  # an exception of the rank whose class cannot be rebuilt here, say
                results[rank] = RankError(f"rank {rank}: its answer cannot be read: {error}")
    return results


def _child(pipe: Connection, rank: int, ranks: int, fn: Callable[[Any], Any], timeout: float) -> None:
    torch.set_num_threads(1)  # before anything else: OpenMP's threads did not survive the fork
    # All ranks are on this machine, whose own name need not lead to an address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    result: Any
    try:
        store, patience = TCPStore("127.0.0.1", pipe.recv(), is_master=False), timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        # A rank that has nothing to do must not be gone before the slowest has connected to it.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(ranks)], patience)
        result = fn(dist.group.WORLD)
    except BaseException as error:
        print(f"rank {rank}:\n{traceback.format_exc()}", file=sys.stderr)
        result = error
        if _FORKED_AUTOGRAD in str(error):
            result = RankError(
                "PyTorch cannot run a backward pass in a process forked after one on a machine with GPUs: "
                "hide them (CUDA_VISIBLE_DEVICES=) or call run_ranks before the first backward pass"
            )
    answer = io.BytesIO()
    try:
        torch.save(result, answer)
    except Exception as error:
        answer = io.BytesIO()
        torch.save(RankError(f"rank {rank}: the result cannot be sent back: {error}"), answer)
    pipe.send_bytes(answer.getvalue())
    pipe.close()
