"""The watch over exchanges: what it takes for a failure, and what it does then."""

from __future__ import annotations

import threading
import time

import pytest

from meshattn.transport.base import TransportError
from meshattn.transport.watch import Watch
from waiting import eventually

TIMEOUT = 0.3
pytestmark = pytest.mark.timeout(30)


class End:
    """An end of an exchange whose state the test sets."""

    def __init__(self, name: str, *, begun: bool = True) -> None:
        self.failure = f"{name}: nothing"
        self.begun, self.done, self.freed, self.recycled = begun, False, 0, 0
        self.stuck = False  # cannot be let go
        self.looks = 0

    def has_begun(self) -> bool:
        return self.begun

    def is_done(self) -> bool:
        self.looks += 1
        return self.done

    def let_go(self) -> None:
        self.freed += 1
        self.done = not self.stuck

    def recycle(self) -> None:
        self.recycled += 1


def test_what_ends_is_recycled_once() -> None:
    watch, ends = Watch(TIMEOUT), [End(str(n)) for n in range(4)]
    for end in ends:
        watch.add(end)
    ends[0].done = ends[1].done = True
    assert eventually(lambda: ends[1].recycled == 1, 10)
    assert [end.recycled for end in ends] == [1, 1, 0, 0]
    ends[2].done = ends[3].done = True
    assert eventually(lambda: ends[3].recycled == 1, 10)
    assert [end.recycled for end in ends] == [1] * 4 and not any(end.freed for end in ends)
    watch.check()
    watch.stop()


def test_a_stalled_exchange_is_named_and_all_are_let_go() -> None:
    watch, first, second = Watch(TIMEOUT), End("first"), End("second", begun=False)
    begin = time.monotonic()
    watch.add(first)
    watch.add(second)
    assert eventually(lambda: watch.failure is not None, 10)
    assert TIMEOUT <= time.monotonic() - begin < 4 * TIMEOUT
    assert eventually(lambda: first.freed == second.freed == 1, 10)
    for _ in range(2):
        with pytest.raises(TransportError, match=r"^first: nothing within 0.3 s$"):
            watch.check()
    watch.stop()


def test_what_comes_after_the_failure_is_let_go_too() -> None:
    watch, late = Watch(TIMEOUT), End("late", begun=False)
    watch.fail("a peer said so")
    watch.fail("something else")
    watch.add(late)
    assert eventually(lambda: late.freed == 1, 10)
    with pytest.raises(TransportError, match=r"^a peer said so$"):
        watch.check()
    watch.stop()


def test_time_counts_from_when_the_exchange_could_begin() -> None:
    """The GPU may have hours of other work before it."""
    watch, end = Watch(TIMEOUT), End("end", begun=False)
    watch.add(end)
    time.sleep(3 * TIMEOUT)
    watch.check()
    end.begun = True
    time.sleep(TIMEOUT / 2)
    watch.check()
    assert eventually(lambda: watch.failure is not None, 10)
    watch.stop()


def test_time_counts_anew_for_the_next_exchange() -> None:
    watch = Watch(TIMEOUT)
    for number in range(6):
        end = End(str(number))
        watch.add(end)
        time.sleep(TIMEOUT / 2)
        end.done = True
        watch.check()
    watch.stop()


def test_many_are_looked_through_quickly() -> None:
    watch, ends = Watch(TIMEOUT), [End(str(n)) for n in range(1000)]
    for end in ends[:990]:
        end.done = True
    for end in ends:
        watch.add(end)
    assert eventually(lambda: ends[989].recycled == 1, 10)
    assert sum(end.looks for end in ends[:900]) < 700
    assert [end.recycled for end in ends] == [1] * 990 + [0] * 10
    watch.stop()


def test_what_cannot_be_let_go_ends_otherwise() -> None:
    given_up: list[str] = []
    watch, end = Watch(TIMEOUT, give_up=given_up.append, patience=0.2), End("end")
    end.stuck = True
    watch.add(end)
    assert eventually(lambda: bool(given_up), 10)
    assert given_up[0] == "end: nothing within 0.3 s" and end.freed > 1
    watch.stop()


def test_the_thread_is_prepared_and_ends() -> None:
    entered: list[str] = []
    watch = Watch(TIMEOUT, lambda: entered.append(threading.current_thread().name))
    assert not entered
    end = End("end")
    watch.add(end)
    assert eventually(lambda: bool(entered), 10)
    watch.stop()
    assert watch._thread is not None and not watch._thread.is_alive()
    assert entered == [watch._thread.name]


def test_a_watch_that_fails_itself_says_so() -> None:
    def broken() -> bool:
        raise RuntimeError("no device")

    watch = Watch(TIMEOUT)
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        end = End("end")
        end.is_done = broken  # type: ignore[method-assign]
        watch.add(end)
        assert eventually(lambda: watch.failure is not None, 10)
    finally:
        threading.excepthook = hook
    with pytest.raises(TransportError, match="the watch over the exchanges has failed: no device"):
        watch.check()
