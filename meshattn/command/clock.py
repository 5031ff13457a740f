"""Times of work that all ranks of a mesh do at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

REPEATS = 7
LONG_SECONDS = 0.3
"""Of a run: so long ones are repeated twice, as they have no start to speak of."""
SETTLE_SECONDS = 0.04
"""A GPU takes some tens of milliseconds to lower its clock to what lasting load leaves it."""
CYCLES = 2e9
"""Of a GPU, in a second, at most."""

Run = Callable[[], object]


@dataclass
class Clock:
    """Microseconds on the device, of runs one behind the other; all is collective.

    ``agree`` gives all ranks one number for what each of them has, and lets them begin together.
    """

    device: torch.device
    agree: Callable[[float], float]
    queued: dict[str, list[float]] = field(default_factory=dict)
    """By kind of work: microseconds that the host took to queue each that was timed on a GPU."""

    def us(self, run: Run, kind: str) -> float:
        """The median over the runs, and over the ranks; it has run before, and made what it keeps."""
        if self.device.type != "cuda":
            whole = self.agree(self._host_us(run)) / 1e6
            return self.agree(statistics.median(self._host_us(run) for _ in range(_repeats(whole))))
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        run()
        host = self.agree(time.perf_counter() - begin)
        torch.cuda.synchronize(self.device)
        whole = self.agree(time.perf_counter() - begin)
        settle, batch = min(10, round(SETTLE_SECONDS / whole)), 10 if whole < 2e-3 else 1
        lead = round(CYCLES * min(3 * (settle + batch) * host + 1e-4, 0.5))
        spent = [self._device_us(run, settle, batch, lead) for _ in range(_repeats(whole))]
        self.queued.setdefault(kind, []).append(statistics.median(host for _, host in spent))
        middle = statistics.median(device for device, _ in spent)
        assert math.isfinite(middle)
        return self.agree(middle)

    def start_us(self) -> float:
        """What the host takes to queue a kernel or an exchange; a CPU runs them at once."""
        kinds = [statistics.median(times) for times in self.queued.values()]
        return self.agree(statistics.mean(kinds) if kinds else 0.0)

    def _host_us(self, run: Run) -> float:
        """Of work that ends before the call does."""
        self.agree(0.0)
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6

    def _device_us(self, run: Run, settle: int, batch: int, lead: int) -> tuple[float, float]:
        """Of the device, behind so many cycles in which the host gets ahead of it and other runs, and of the
        host."""
        self.agree(0.0)
        event = partial(torch.cuda.Event, enable_timing=True)
        begin, end = event(), event()
        torch.cuda._sleep(lead)  # type: ignore[no-untyped-call]
        for _ in range(settle):
            run()
        begin.record()
        started = time.perf_counter()
        for _ in range(batch):
            run()
        host = time.perf_counter() - started
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / batch, host * 1e6 / batch


def _repeats(seconds: float) -> int:
    return REPEATS if seconds < LONG_SECONDS else 2
