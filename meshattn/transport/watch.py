"""Finds exchanges that do not end although nothing of this rank holds them up, without stopping the host.

Where exchanges run on GPU streams the host goes on at once, so nobody sits in a wait that could time out. A
thread looks at the oldest exchange of each lane now and then: once all that precedes it on this rank is
done, it has ``timeout`` seconds to end. Then the watch remembers the failure, which the next call raises,
and lets go of everything that waits: a blocked stream would make every later synchronisation hang.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from meshattn.transport.base import TransportError

_LOOKS_PER_TIMEOUT = 20
_LONGEST_PAUSE = 0.25  # seconds between two looks
_RESCUE_PAUSE = 0.02
_REAPED_AT_ONCE = 8


@dataclass(frozen=True)
class Pending:
    """One end of an exchange that streams have been told to wait for."""

    lane: str  # exchanges of a lane end in the order in which they were added
    failure: str  # what to say if it does not end, without the time
    has_begun: Callable[[], bool]  # all that this rank does before it is done
    is_done: Callable[[], bool]
    let_go: Callable[[], None]  # end it without its data, in a way that shows in the results
    recycle: Callable[[], None] = lambda: None


class Watch:
    """Watches the exchanges of one rank.

    Args:
        timeout: seconds that an exchange may take once it has begun.
        enter_thread: called first in the watching thread.
    """

    def __init__(self, timeout: float, enter_thread: Callable[[], None] = lambda: None) -> None:
        self._timeout = timeout
        self._enter_thread = enter_thread
        self._pause = min(_LONGEST_PAUSE, timeout / _LOOKS_PER_TIMEOUT)
        self._lanes: dict[str, deque[Pending]] = {}
        self._since: dict[str, tuple[Pending, float]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.failure: str | None = None

    def check(self) -> None:
        """TransportError if an exchange has failed."""
        if self.failure is not None:
            raise TransportError(self.failure)

    def fail(self, failure: str) -> None:
        """Remember a failure that was found elsewhere; the first one counts."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify()

    def add(self, pending: Pending) -> None:
        with self._changed:
            lane = self._lanes.setdefault(pending.lane, deque())
            self._reap(lane, _REAPED_AT_ONCE)
            lane.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="meshattn-watch", daemon=True)
                self._thread.start()
            elif len(lane) == 1:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread. What is still pending is not watched any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(10 * _LONGEST_PAUSE)

    def _reap(self, lane: deque[Pending], most: int) -> None:
        while lane and most and lane[0].is_done():
            lane.popleft().recycle()
            most -= 1

    def _run(self) -> None:
        try:
            self._enter_thread()
            while self._look():
                time.sleep(self._pause if self.failure is None else _RESCUE_PAUSE)
        except Exception as error:
            self.failure = self.failure or f"the watch over the exchanges has failed: {error}"
            raise

    def _look(self) -> bool:
        """One look at all lanes; False when there is nothing to do any more."""
        with self._changed:
            while not self._stopped and not any(self._lanes.values()):
                self._changed.wait()
            if self._stopped:
                return False
            for name, lane in self._lanes.items():
                self._reap(lane, len(lane))
                if self.failure is None and lane and self._overdue(name, lane[0]):
                    self.failure = f"{lane[0].failure} within {self._timeout:g} s"
            if self.failure is not None:
                for lane in self._lanes.values():
                    for pending in lane:
                        if not pending.is_done():
                            pending.let_go()
            return True

    def _overdue(self, lane: str, head: Pending) -> bool:
        now = time.monotonic()
        known, since = self._since.get(lane, (None, now))
        if known is not head or not head.has_begun():
            self._since[lane] = head, now
            return False
        return now - since > self._timeout
