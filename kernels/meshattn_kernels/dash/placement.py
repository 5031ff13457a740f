"""Which worker does which jobs: the launch order of all heads and a list scheduler.

A unit is what keeps a key/value tile in registers: one query head, or the query heads of a group one after
the other. The units that are in flight together are launched job by job, then the next such set.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from meshattn_kernels.dash.schedules import Walks

TASK_COST = 2
"""Time of loading a key/value tile and storing dk, dv, in steps."""

PART_COST = 2
"""What a task costs more, in steps, when its dk, dv are a part of a sum over tasks, which is read again."""

DELAY_UNITS = 64
Delay = tuple[int, int]
"""How many workers, the last ones, begin late because others hold their multiprocessors, and by how much: in
64ths of the time that all jobs take on all workers."""
NO_DELAY: Delay = (0, 0)


def even_groups(units: int, in_flight: int) -> list[tuple[int, int]]:
    """Bounds of the fewest groups of at most ``in_flight`` units; sizes differ by one at most."""
    groups = -(-units // max(in_flight, 1))
    return [(units * i // groups, units * (i + 1) // groups) for i in range(groups)]


def launch_order(walks: Walks, units: int, in_flight: int) -> tuple[Tensor, Tensor]:
    """(unit, job) of all launches in order: those of early jobs first, of all units together, those of late
    jobs last, together if there are early ones; the others by group of units. Then wave, unit, job."""
    jobs = torch.unique_consecutive(walks.job)
    wave = torch.zeros_like(jobs)
    wave[walks.job] = walks.wave
    early, late = walks.early, len(jobs) if walks.late is None else walks.late
    parts = [torch.zeros(2, 0, dtype=torch.int64)]
    phases = (0, early, units), (early, late, in_flight), (late, len(jobs), units if early else in_flight)
    for first, last, width in phases:
        if first < last:
            for begin, end in even_groups(units, width):
                number = torch.arange((end - begin) * (last - first))
                unit, job = begin + number // (last - first), first + number % (last - first)
                order = torch.argsort((wave[job] * units + unit) * len(jobs) + job)
                parts.append(torch.stack((unit[order], jobs[job[order]])))
    unit, job = torch.cat(parts, 1).unbind(0)
    return unit, job


def job_costs(walks: Walks, heads_of_unit: int, parts: bool) -> list[int]:
    """Time of each job of a unit, in steps. ``parts``: all tiles are sums over tasks, not only those of early
    and late jobs."""
    runs = torch.ones_like(walks.kv)
    runs[1:] = ((walks.kv[1:] != walks.kv[:-1]) | (walks.job[1:] != walks.job[:-1])).long()
    begin = TASK_COST + parts * PART_COST * torch.ones_like(walks.kv)
    if walks.late is not None:
        begin += ((walks.job < walks.early) | (walks.job >= walks.late)) * PART_COST
    cost = walks.length * heads_of_unit + runs * begin
    jobs = int(walks.job[-1]) + 1 if len(walks.job) else 0
    total: list[int] = torch.zeros(jobs, dtype=torch.int64).index_add_(0, walks.job, cost).tolist()
    return total


def place(costs: Sequence[float], workers: int, delay: Delay = NO_DELAY) -> tuple[list[int], float]:
    """Worker of each launch and the makespan, when the worker that is free first takes the next one."""
    number, share = delay
    begin = sum(costs) * share / (DELAY_UNITS * workers)
    free: list[tuple[float, int]] = [
        (0 if worker < max(1, workers - number) else begin, worker) for worker in range(workers)
    ]
    owner = []
    for cost in costs:
        time, worker = free[0]
        heapq.heapreplace(free, (time + cost, worker))
        owner.append(worker)
    return owner, max(time for time, _ in free)


def place_in_turn(count: int, workers: int) -> list[int]:
    """Launch i goes to worker i mod workers, so that as many as there are workers in a row share none."""
    return [launch % workers for launch in range(count)]
