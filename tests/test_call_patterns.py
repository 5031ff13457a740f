"""What one rank asks the store: which calls are compared, what is kept of them, and a store that is gone."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed import HashStore

from meshattn import agreement
from meshattn.agreement import Agreement, RankMismatchError
from meshattn.disagreement import absence
from meshattn.transport.base import TransportError
from meshattn.trouble import Trouble


class CountingStore(HashStore):
    """Counts the writes, one for each check."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def set(self, *args: Any) -> None:
        self.writes += 1
        super().set(*args)


def _checks(pattern: list[str], periods: int) -> list[int]:
    """Checks in each period of a pattern of calls, on a single rank."""
    store = CountingStore()
    agreement = Agreement(store, 0, [0], 5.0)
    counts = []
    for _ in range(periods):
        before = store.writes
        for action in pattern:
            agreement.enter(action, {"size": action})
        counts.append(store.writes - before)
    return counts


@pytest.mark.parametrize("pattern", ["ab", "abc", "abcde", "aab", "aaaabcd"], ids=str)
def test_patterns_of_calls_are_checked_once(pattern: str) -> None:
    """A training loop pays for its first period (and the way back) only, layers that look alike included."""
    first, second, *later = _checks(list(pattern), 5)
    assert first == len(pattern)
    assert second <= 1 and later == [0, 0, 0]


def test_a_row_of_equal_calls_is_checked_no_longer_than_a_model_is_deep() -> None:
    checks = _checks(["a"], 300)
    assert sum(checks) <= 129 and not any(checks[129:])


def test_calls_that_come_again_are_remembered_and_others_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside calls that come once: a call that always follows another one is checked once."""
    monkeypatch.setattr(agreement, "_REMEMBERED", 4)
    store = CountingStore()
    ours, checks = Agreement(store, 0, [0], 5.0), []
    for number in range(20):
        before = store.writes
        for action in ("first", "second", f"once, number {number}"):
            ours.enter(action, {"size": "3"})
        checks.append(store.writes - before)
        assert len(ours._next) <= 4
    assert checks == [3, *[2] * 19]


def test_a_check_leaves_few_keys_behind() -> None:
    store = HashStore()
    agreement = Agreement(store, 0, [0], 5.0)
    for number in range(50):
        agreement.enter("call", {"number": str(number)})
    assert store.num_keys() <= 3


class BrokenStore(HashStore):
    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        raise RuntimeError("Broken pipe\nframe 0: of the library")


def test_a_store_whose_host_has_ended_is_told_with_the_call() -> None:
    agreement = Agreement(BrokenStore(), 0, range(3), 0.05)
    with pytest.raises(TransportError, match=r"^attend, call 1: the store .* is gone; .*\(Broken pipe\)$"):
        agreement.enter("attend", {"q": "alike"})
    trouble = Trouble()
    with trouble:
        raise ValueError("wrong here")
    with pytest.raises(ValueError, match="wrong here"):
        agreement.enter("attend", {"q": "alike"}, trouble)


def test_ranks_that_said_nothing_are_named() -> None:
    """After a failed transfer: whether they go on as this rank does, or are dead, the store does not tell."""
    store = HashStore()
    here, odd = (Agreement(store, rank, range(4), 0.05) for rank in (0, 1))
    with pytest.raises(RankMismatchError):
        odd.enter("call", {"causal": "True"})
    blamed = here.blame()
    assert blamed is not None and "(ranks 2, 3 said nothing" in blamed


def test_ranks_that_came_too_late_are_not_called_absent() -> None:
    """Between the end of waiting and the look at who is there, the last one may come."""
    text = absence("mesh_attention, call 3", {"q": "[1, 4, 2, 8]"}, None, [0, 1, 2], [], 8.0)
    assert "all ranks came to it, but not within 8 s" in text and "longer timeout" in text
