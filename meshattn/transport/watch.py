"""Finds exchanges that do not end although nothing of this rank holds them up, without stopping the host.

Where exchanges run on GPU streams the host goes on at once, so nobody sits in a wait that could time out. A
thread looks at the oldest exchange now and then: once all that precedes it on this rank is done, it has
``timeout`` seconds to end. Then the watch remembers the failure, which the next call raises, and lets go of
everything that waits: a blocked stream would make every later synchronisation hang.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from meshattn.transport.base import TransportError

_LOOKS_PER_TIMEOUT = 20
_LONGEST_PAUSE = 0.25  # seconds between two looks
_RESCUE_PAUSE = 0.005


def outlasting(timeout: float) -> float:
    """Seconds for others that give up without a name, so that a watch with ``timeout`` speaks first."""
    return 2 * timeout + 60


def end_process(failure: str) -> None:
    """Nothing can free the streams any more: an end with a message is better than none."""
    print(
        f"meshattn: {failure}, and the GPU cannot be freed: ending the process", file=sys.stderr, flush=True
    )
    os.kill(os.getpid(), signal.SIGABRT)


class Pending(Protocol):
    """One end of an exchange that streams have been told to wait for. They end in the order in which they
    are added."""

    @property
    def failure(self) -> str:
        """What to say if it does not end, without the time."""
        ...

    def has_begun(self) -> bool:
        """All that this rank does before it is done, and so is what was added before it."""
        ...

    def is_done(self) -> bool: ...

    def let_go(self) -> None:
        """End it without its data, in a way that shows in the results."""
        ...

    def recycle(self) -> None:
        """It is done: nobody looks at it any more."""
        ...


class Watch:
    """Watches the exchanges of one rank.

    Args:
        timeout: seconds that an exchange may take once it has begun.
        enter_thread: called first in the watching thread.
        give_up: called with the failure if none ends any more although all have been let go.
        patience: seconds until then.
        look_around: called at every look.
    """

    def __init__(
        self,
        timeout: float,
        enter_thread: Callable[[], None] = lambda: None,
        give_up: Callable[[str], None] = lambda _: None,
        patience: float = 10.0,
        look_around: Callable[[], None] = lambda: None,
    ) -> None:
        self._timeout = timeout
        self._enter_thread = enter_thread
        self._give_up = give_up
        self._patience = patience
        self._look_around = look_around
        self._pause = min(_LONGEST_PAUSE, timeout / _LOOKS_PER_TIMEOUT)
        self._pending: deque[Pending] = deque()
        self._since: tuple[Pending | None, float] = None, 0.0
        self._patience_ends: threading.Timer | None = None
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None

    def check(self) -> None:
        """TransportError if an exchange has failed."""
        if self.failure is not None:
            raise TransportError(self.failure)

    def fail(self, failure: str) -> None:
        """Remember a failure that was found elsewhere; the first one counts."""
        self.failure = self.failure or failure

    def add(self, pending: Pending) -> None:
        """Watch one more. Cheap, since it is called for every exchange: no lock, no look at the GPU, and the
        thread is not woken, which would take the interpreter from this one."""
        self._pending.append(pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshattn-watch", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. What is still pending is not watched any more, nor kept alive."""
        self._ends.set()
        self._stop_patience()
        if self._thread is not None:
            self._thread.join(10 * _LONGEST_PAUSE)
        if self._thread is None or not self._thread.is_alive():
            self._pending.clear()
            self._since = None, 0.0

    def _run(self) -> None:
        try:
            self._enter_thread()
            while not self._ends.wait(self._pause if self.failure is None else _RESCUE_PAUSE):
                self._look()
                self._look_around()
        except Exception as error:
            self.failure = self.failure or f"the watch over the exchanges has failed: {error}"
            raise

    def _look(self) -> None:
        if self._reap():
            self._stop_patience()
        if self.failure is None and self._pending and self._overdue(self._pending[0]):
            self.failure = f"{self._pending[0].failure} within {self._timeout:g} s"
        if not self._pending:
            self._stop_patience()
        elif self.failure is not None:
            self._rescue(list(self._pending))

    def _rescue(self, stuck: Sequence[Pending]) -> None:
        if self._patience_ends is None:
            # On a thread of its own: a call of the driver may not come back while its queue is blocked.
            self._patience_ends = threading.Timer(self._patience, self._give_up, (self.failure,))
            self._patience_ends.daemon = True
            self._patience_ends.start()
        for pending in stuck:
            if not pending.is_done():
                pending.let_go()

    def _stop_patience(self) -> None:
        if self._patience_ends is not None:
            self._patience_ends.cancel()
            self._patience_ends = None

    def _overdue(self, head: Pending) -> bool:
        now = time.monotonic()
        known, since = self._since
        if known is not head or not head.has_begun():
            self._since = head, now
            return False
        return now - since > self._timeout

    def _reap(self) -> bool:
        """Take out what is done, if anything is. They end in order: if the last is done, all are."""
        pending = self._pending
        done, taken = len(pending), 0
        while done and not pending[done - 1].is_done():
            done //= 2
        while done or (pending and pending[0].is_done()):
            pending.popleft().recycle()
            done = max(0, done - 1)
            taken += 1
        return taken > 0
