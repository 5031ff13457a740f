"""Timing in turns, in the state that a GPU keeps under lasting load.

A Hopper GPU is limited by its power: it lowers its clock within some tens of milliseconds, to a rate that
depends on what runs, and the first launches after a rest are 5 to 10 % faster than later ones. So what is
compared takes turns in one process, and each turn first runs until the clock has settled to this kernel. The
limit averages over more than that: one kernel was 2 to 4 % faster behind a slower one than behind itself. So
every turn also stands behind the same matrix products.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from harness import Timing

Run = Callable[[], object]
Name = TypeVar("Name")

MATMUL_SIZE = 8192
LEAD_MS = 40.0


class Clock(Protocol):
    matmul_flop: float

    def warm(self, seconds: float) -> None:
        """Bring the device into its lasting state."""
        ...

    def once(self, run: Run) -> tuple[float, float]:
        """Milliseconds on the device, and of the host to queue it, of a run that was made before."""
        ...

    def burst(self, run: Run, settle: int, repeats: int, lead_ms: float) -> list[float]:
        """Milliseconds of each of ``repeats`` runs, one right behind the other, after ``settle`` others.
        Matrix products of ``lead_ms`` stand before them, at least what the host needs more than the device to
        queue them all."""
        ...

    def matmul(self) -> None:
        """One product of square matrices, the rate that kernels are compared with."""
        ...


class CudaClock:
    """Times by events of the current stream."""

    def __init__(self) -> None:
        size = (MATMUL_SIZE, MATMUL_SIZE)
        self._a, self._b = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self._c = torch.empty_like(self._a)
        self.matmul_flop = 2.0 * MATMUL_SIZE**3
        self.matmul()
        self._lead_ms, _ = self.once(self.matmul)

    def matmul(self) -> None:
        torch.mm(self._a, self._b, out=self._c)

    def warm(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds * 1e3 / self._lead_ms)):
            self.matmul()
        torch.cuda.synchronize()

    def once(self, run: Run) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        start = time.perf_counter()
        run()
        host = (time.perf_counter() - start) * 1e3
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end), host

    def burst(self, run: Run, settle: int, repeats: int, lead_ms: float) -> list[float]:
        for _ in range(4):
            for _ in range(math.ceil(lead_ms / self._lead_ms)):
                self.matmul()
            for _ in range(settle):
                run()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            events[0].record()
            for event in events[1:]:
                run()
                event.record()
            starved = events[-2].query()  # else the device was behind the host to the end
            torch.cuda.synchronize()
            if not starved:
                break
            lead_ms = 2 * lead_ms + 4 * self._lead_ms
        return [a.elapsed_time(b) for a, b in itertools.pairwise(events)]


class HostClock:
    """Times runs that end before they return."""

    def __init__(self, size: int = 64) -> None:
        self._a = torch.zeros(size, size)
        self.matmul_flop = 2.0 * size**3

    def matmul(self) -> None:
        torch.mm(self._a, self._a)

    def warm(self, seconds: float) -> None:
        pass

    def once(self, run: Run) -> tuple[float, float]:
        start = time.perf_counter()
        run()
        spent = (time.perf_counter() - start) * 1e3
        return spent, spent

    def burst(self, run: Run, settle: int, repeats: int, lead_ms: float) -> list[float]:
        return [self.once(run)[0] for _ in range(repeats)]


def alternate(
    clock: Clock, runs: Mapping[Name, Run], *, rounds: int, burst_ms: float = 20.0, warm_s: float = 0.3
) -> dict[Name, Timing]:
    """Times of all runs, which take turns; each round begins with another one, and every other one goes the
    other way. A turn settles for about ``burst_ms`` (at least one run) behind `LEAD_MS` of matrix products
    and is timed for as long (2 to 100 runs). Turns differ more than the runs of a turn do, so many short ones
    say more than a few long ones in the same time."""
    costs = {}
    for name, run in runs.items():
        run()
        costs[name] = clock.once(run)
    clock.warm(warm_s)
    samples: dict[Name, list[list[float]]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        turn = number * len(names) // rounds
        for name in (names[turn:] + names[:turn])[:: -1 if number % 2 else 1]:
            device_ms, host_ms = costs[name]
            wanted = round(burst_ms / max(device_ms, 1e-3))
            settle, repeats = min(100, max(1, wanted)), min(100, max(2, wanted))
            lead_ms = max(LEAD_MS, (1.5 * host_ms - device_ms) * (settle + repeats))
            samples[name].append(clock.burst(runs[name], settle, repeats, lead_ms))
    return {
        name: replace(Timing.of([*itertools.chain(*turns)]), turns=tuple(map(statistics.median, turns)))
        for name, turns in samples.items()
    }


def host_us(run: Run, calls: int = 60) -> float:
    """Median microseconds that the host spends in a call while the device is busy with something else."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    spent = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        spent.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return sorted(spent)[calls // 2]
