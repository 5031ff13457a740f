"""The watch over exchanges: what it takes for a failure, and what it does then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from meshattn.transport.base import TransportError
from meshattn.transport.watch import Pending, Watch

TIMEOUT = 0.3
pytestmark = pytest.mark.timeout(30)


class End:
    """An end of an exchange whose state the test sets."""

    def __init__(self, name: str, *, begun: bool = True) -> None:
        self.name, self.begun, self.done, self.let_go, self.recycled = name, begun, False, 0, 0

    def pending(self, lane: str = "receive") -> Pending:
        def let_go() -> None:
            self.let_go += 1
            self.done = True

        def recycle() -> None:
            self.recycled += 1

        return Pending(lane, f"{self.name}: nothing", lambda: self.begun, lambda: self.done, let_go, recycle)


def _until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def test_what_ends_is_recycled_once_and_in_order() -> None:
    watch, ends = Watch(TIMEOUT), [End(str(n)) for n in range(4)]
    for end in ends:
        watch.add(end.pending())
    ends[1].done = True
    time.sleep(0.1)
    assert ends[1].recycled == 0, "the one before it in its lane is not done"
    ends[0].done = True
    assert _until(lambda: ends[1].recycled == 1)
    ends[2].done = ends[3].done = True
    assert _until(lambda: ends[3].recycled == 1)
    assert [end.recycled for end in ends] == [1] * 4 and not any(end.let_go for end in ends)
    watch.check()
    watch.stop()


def test_a_stalled_exchange_is_named_and_all_are_let_go() -> None:
    watch, first, second, other = Watch(TIMEOUT), End("first"), End("second", begun=False), End("other")
    begin = time.monotonic()
    watch.add(first.pending())
    watch.add(second.pending())
    watch.add(other.pending("send"))
    assert _until(lambda: watch.failure is not None)
    assert TIMEOUT <= time.monotonic() - begin < 4 * TIMEOUT
    assert _until(lambda: first.let_go == second.let_go == other.let_go == 1)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"^(first|other): nothing within 0.3 s$"):
            watch.check()
    watch.stop()


def test_what_comes_after_the_failure_is_let_go_too() -> None:
    watch, late = Watch(TIMEOUT), End("late", begun=False)
    watch.fail("a peer said so")
    watch.fail("something else")
    watch.add(late.pending())
    assert _until(lambda: late.let_go == 1)
    with pytest.raises(TransportError, match=r"^a peer said so$"):
        watch.check()
    watch.stop()


def test_time_counts_from_when_the_exchange_could_begin() -> None:
    """The GPU may have hours of other work before it."""
    watch, end = Watch(TIMEOUT), End("end", begun=False)
    watch.add(end.pending())
    time.sleep(3 * TIMEOUT)
    watch.check()
    end.begun = True
    time.sleep(TIMEOUT / 2)
    watch.check()
    assert _until(lambda: watch.failure is not None)
    watch.stop()


def test_time_counts_anew_for_the_next_exchange() -> None:
    watch = Watch(TIMEOUT)
    for number in range(6):
        end = End(str(number))
        watch.add(end.pending())
        time.sleep(TIMEOUT / 2)
        end.done = True
        watch.check()
    watch.stop()


def test_the_thread_is_prepared_and_ends() -> None:
    entered: list[str] = []
    watch = Watch(TIMEOUT, lambda: entered.append(threading.current_thread().name))
    assert not entered
    end = End("end")
    watch.add(end.pending())
    assert _until(lambda: bool(entered))
    watch.stop()
    assert watch._thread is not None and not watch._thread.is_alive()
    assert entered == [watch._thread.name]


def test_a_watch_that_fails_itself_says_so() -> None:
    def broken() -> bool:
        raise RuntimeError("no device")

    watch = Watch(TIMEOUT)
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        watch.add(Pending("send", "x", broken, broken, lambda: None))
        assert _until(lambda: watch.failure is not None)
    finally:
        threading.excepthook = hook
    with pytest.raises(TransportError, match="the watch over the exchanges has failed: no device"):
        watch.check()
