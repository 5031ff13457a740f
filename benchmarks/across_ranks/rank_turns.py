"""Timing of forward and backward passes on several ranks, which take turns in lockstep.

Each turn runs pairs of a forward and a backward pass one behind the other, as training does, and the host may
run ahead of the GPU. PyTorch hands a backward pass to a thread of its own, in a model once for all layers;
here, where every layer is a pass, it would come twice for each pair, so it stays in the thread that calls it.
The first third of a turn only settles the clock of the GPU. The time of a rank is the
mean over the rest, that of the turn the slowest rank's: of the forward passes, of the backward passes, and of
both together, since a rank that is late in one may have waited less in the other. What is compared is
compared within a round, where the turns lie milliseconds apart: clocks drift by a tenth within seconds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from across_ranks.rank_contenders import Contender

PASSES = ("forward", "backward", "both")
AHEAD = 8  # pairs of passes that the host can enqueue without waiting for the GPU
LONG_MS = 500.0  # a pair of passes that settles the clock by itself


@dataclass(frozen=True)
class Turn:
    """Milliseconds of one turn, of the slowest rank; ``host`` of a pair of passes as the host enqueues it."""

    forward: float
    backward: float
    both: float
    host: float


def in_turns(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    rounds: int,
    turn_ms: float,
    told: Callable[[str], None] = lambda _: None,
    after: Callable[[dict[str, list[Turn]]], None] = lambda _: None,
) -> dict[str, list[Turn]]:
    """The turns of every contender, by name, one a round; each round begins with another one, and every
    second one goes backwards, so that nobody always comes after the same. ``told`` hears of each turn,
    ``after`` gets what there is behind each round. Collective.
    """
    turns: dict[str, list[Turn]] = {contender.name: [] for contender in contenders}
    pairs: dict[str, int] = {}
    for number in range(rounds + 1):  # in the first, all is made and the lengths of the turns are set
        begin = number % len(contenders)
        turn = [*contenders[begin:], *contenders[:begin]]
        for contender in turn if number % 2 else reversed(turn):
            with contender.entered():
                if number == 0:
                    cost = _turn(contender, device, 1)
                    if cost.both < LONG_MS:  # else what is made in the first passes is little of it
                        _turn(contender, device, 1)
                        cost = _turn(contender, device, 2)
                    fewest = 3 if cost.both < LONG_MS else 1
                    pairs[contender.name] = min(60, max(fewest, round(turn_ms / cost.both)))
                    told(f"{contender.name} takes {cost.both:.1f} ms, {pairs[contender.name]} times a turn")
                else:
                    spent = _turn(contender, device, pairs[contender.name])
                    turns[contender.name].append(spent)
                    told(f"round {number}: {contender.name} {spent.forward:.3f} and {spent.backward:.3f} ms")
        if number:
            after(turns)
    return turns


def _turn(contender: Contender, device: torch.device, pairs: int) -> Turn:
    settling = pairs // 3
    times = _gpu_times if device.type == "cuda" else _cpu_times
    forward, backward, host = times(contender, settling, pairs)
    slowest = torch.tensor([forward, backward, forward + backward, host])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Turn(*slowest.tolist())


def _gpu_times(contender: Contender, settling: int, pairs: int) -> tuple[float, float, float]:
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(settling):  # so that passes recur that run as graphs from then on
            contender.backward(contender.forward())
        torch.cuda.synchronize()
        dist.barrier()
        # Of a host that is not far ahead: then it waits for the GPU to take its work.
        clock = [time.perf_counter()]
        for _ in range(min(AHEAD, max(1, settling))):
            contender.backward(contender.forward())
            clock.append(time.perf_counter())
        timed = pairs - settling
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * timed)]
        events.append(torch.cuda.Event(enable_timing=True, blocking=True))
        events[0].record()
        for number in range(timed):
            out = contender.forward()
            events[2 * number + 1].record()
            contender.backward(out)
            del out
            events[2 * number + 2].record()
    host = statistics.median([(b - a) * 1e3 for a, b in itertools.pairwise(clock)])
    events[-1].synchronize()  # asleep: ranks that share cores would take them from those who send
    spans = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.fmean(spans[0::2]), statistics.fmean(spans[1::2]), host


def _cpu_times(contender: Contender, settling: int, pairs: int) -> tuple[float, float, float]:
    spans = []
    dist.barrier()
    for _ in range(pairs):
        begin = time.perf_counter()
        out = contender.forward()
        middle = time.perf_counter()
        contender.backward(out)
        spans.append((middle - begin, time.perf_counter() - middle))
    forward, backward = (statistics.fmean(x) * 1e3 for x in zip(*spans[settling:], strict=True))
    return forward, backward, forward + backward


def column(turns: Sequence[Turn], name: str) -> list[float]:
    """One pass in all rounds."""
    return [float(getattr(turn, name)) for turn in turns]


def beyond(turns: Mapping[str, Sequence[Turn]], name: str, base: str, step: str) -> list[float]:
    """Milliseconds of a contender beyond those of another in the same round."""
    return [a - b for a, b in zip(column(turns[name], step), column(turns[base], step), strict=True)]
