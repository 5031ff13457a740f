"""All ranks agree on a call before any of its transfers, or all of them raise.

A rank whose call, forward or backward, looks like the one that came at the same place of the pattern last
time goes on without a word. Any other call is checked: every rank writes what it is about to do into the
group's key-value store and reads what the others wrote. So a training loop pays for a check only while its
pattern of calls is new, and a single rank that leaves the pattern stops at the check: the others wait for its
data in vain, look into the store when they time out, and find out who left and how. Two calls that look alike
and come in another order on one rank are not told apart.

Nothing here uses the data channel.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from meshattn.disagreement import absence, difference, digest, first_difference, named
from meshattn.transport.base import TransportError
from meshattn.transport.patience import within
from meshattn.trouble import Trouble

_REMEMBERED = 4096  # places of the pattern whose call is remembered; all ranks forget alike
_LONGEST_RUN = 128  # calls of one kind in a row that are told apart: the layers of a model
_STORE_GRACE = 5.0  # seconds, beyond the timeout, after which the store itself is given up
_QUIET = 20.0  # seconds of waiting for other ranks, after which it is said whom for
_log = logging.getLogger("meshattn")


_Answer = tuple[dict[str, str], tuple[str, str] | None]  # statement; type and text of an error
_Signature = tuple[Any, ...]  # name of a call, and the items of its statement
_Place = tuple[_Signature, str, int]  # after this signature, of this action, the n-th of that action in a row
_NOTHING: _Place = ((), "", 0)


class RankMismatchError(ValueError):
    """The ranks of a mesh were called with different arguments; the message names who differs and in what."""


class OneThread:
    """Lets one thread at a time into the calls of a mesh; to be used with ``with``.

    The calls have one order, the same on all ranks, and the buffers of a mesh belong to one of them.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ValueError(
                "another thread is in a call on this mesh: calls have one order, the same on all ranks, so "
                "make them in one thread, or build a mesh for each"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Agreement:
    """Compares the calls of all ranks of one mesh.

    Args:
        store: key-value store shared by the ranks of this mesh alone.
        rank: this rank.
        ranks: all ranks of the mesh, itself included, by the names that messages give them.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = sorted(ranks)
        self._timeout = timeout
        self._round = 0
        self.one_thread = OneThread()
        self.calls = 0
        self.compared = 0
        self._counts: Counter[str] = Counter()
        self._last = _NOTHING
        self._next: OrderedDict[_Place, _Signature] = OrderedDict()
        self._call = ""
        self._words: Mapping[str, str] = {}

    def enter(self, action: str, statement: Mapping[str, str], trouble: Trouble | None = None) -> None:
        """Collective unless the call was foreseen; raises on every rank if the ranks differ or if one of
        them has trouble.

        Args:
            action: name of the call.
            statement: what must be the same on all ranks, for people to read.
            trouble: what is wrong with the call on this rank, if anything.
        """
        trouble = trouble or Trouble()
        signature = (action, *statement.items())
        expected = self._next.get(self._last)
        self._next[self._last] = signature
        self._next.move_to_end(self._last)
        if len(self._next) > _REMEMBERED:
            self._next.popitem(last=False)
        run = self._last[2] + 1 if action == self._last[1] else 1
        self._last = (signature, action, min(run, _LONGEST_RUN))
        self._call, self._words = f"{action}, call {self._counts[action] + 1}", statement
        if trouble or signature != expected:
            try:
                self._check(trouble, expected)
            except Exception:
                self._forget()
                raise
        # A call that failed is not counted: it may have been another one on each rank.
        self.calls += 1
        self._counts[action] += 1

    def compare(
        self,
        what: str,
        statement: Mapping[str, str],
        trouble: Trouble | None = None,
        *,
        lists: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Collective; raises on every rank if the ranks differ or if one of them has trouble.

        For what every step states anew, such as its documents: it is no part of the pattern of calls, which
        goes on as foreseen.

        Args:
            what: is compared.
            statement: what must be the same on all ranks, for people to read.
            trouble: what is wrong on this rank, if anything.
            lists: numbers that must be the same too. A digest is compared; the numbers themselves are told
                only if the ranks differ, and the first that does is named.
        """
        digests = {name: f"a list with digest {digest(numbers)}" for name, numbers in (lists or {}).items()}
        self._call, self._words = what, {**statement, **digests}
        try:
            self._check(trouble or Trouble(), None, lists)
        except Exception:
            self._forget()
            raise
        self.compared += 1

    def leave(self) -> None:
        """Leave a word for ranks that come to a call after this one has closed the mesh: it ends their wait,
        or is found behind it."""
        told = "ValueError", "the mesh has been closed there: close it on all ranks, after the last call"
        word = json.dumps([{"call": "close"}, told])
        with suppress(RuntimeError, TimeoutError):  # a store that is gone has no readers
            within(_STORE_GRACE, lambda: self._store.set(self._key(self._round, self._rank), word))

    def _forget(self) -> None:
        """All ranks come by here after a failure: they forget what they did differently, or some would
        foresee the next call and others not."""
        self._next.clear()
        self._last = _NOTHING

    @property
    def _statement(self) -> dict[str, str]:
        """What this rank does, or did last."""
        return {"call": self._call, **self._words}

    def blame(self) -> str | None:
        """After a failed transfer: who is not doing what this rank does, if the store tells."""
        try:
            found = within(
                _STORE_GRACE,
                lambda: {rank: self._read(self._round, rank) for rank in self._present(self._round)},
            )
        except (RuntimeError, TimeoutError):
            return None  # the store is gone, or stands still with its host
        if not found:
            return None
        for rank, (_, error) in found.items():
            if error is not None:
                return f"rank {rank}: {error[1]}"
        statements = {rank: statement for rank, (statement, _) in found.items()}
        silent = [rank for rank in self._ranks if rank not in found]
        statements.update(dict.fromkeys(silent, self._statement))
        silent = [rank for rank in silent if rank != self._rank]
        doubt = f" ({named(silent)} said nothing: taken to do as rank {self._rank}, or dead)"
        return difference(statements) + (doubt if silent else "")

    def _key(self, number: int, rank: int) -> str:
        return f"agreement/{number}/{rank}"

    def _read(self, number: int, rank: int) -> _Answer:
        statement, error = json.loads(self._store.get(self._key(number, rank)))
        return statement, error

    def _present(self, number: int) -> list[int]:
        return [rank for rank in self._ranks if self._store.check([self._key(number, rank)])]

    def _check(
        self,
        trouble: Trouble,
        expected: _Signature | None,
        lists: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        number, self._round = self._round, self._round + 1
        mine = json.dumps([self._statement, trouble.words])
        absent = ""
        try:
            answers = within(
                self._timeout + _STORE_GRACE, lambda: self._exchange(number, mine, not trouble, expected)
            )
            if answers is None and not trouble:
                absent = within(_STORE_GRACE, lambda: self._absent(number, expected, self._timeout)[1])
        except (TimeoutError, RuntimeError) as failure:
            if trouble:
                trouble.let_out(failure)
            what = f"is gone; its host, mostly rank 0, has ended ({str(failure).partition(chr(10))[0]})"
            if isinstance(failure, TimeoutError):
                what = f"does not answer within {self._timeout + _STORE_GRACE:g} s; its host has stalled"
            raise TransportError(
                f"{self._statement['call']}: the store of the process group {what}"
            ) from failure
        if trouble:
            trouble.let_out()
        if answers is None:
            raise RankMismatchError(absent)
        for rank, (_, theirs) in answers.items():
            if theirs is not None:
                kind = NotImplementedError if theirs[0] == "NotImplementedError" else ValueError
                raise kind(f"rank {rank}: {theirs[1]}")
        statements = {rank: statement for rank, (statement, _) in answers.items()}
        if any(statement != self._statement for statement in statements.values()):
            if lists and all(statement["call"] == self._call for statement in statements.values()):
                statements = self._first_differences(lists, statements)
            raise RankMismatchError(difference(statements))

    def _first_differences(
        self, lists: Mapping[str, Sequence[int]], statements: dict[int, dict[str, str]]
    ) -> dict[int, dict[str, str]]:
        """The statements with the first number of each list that differs, in the place of its digest; as they
        are if a rank does not tell its lists any more. Collective."""
        number, self._round = self._round, self._round + 1
        mine = json.dumps([{name: " ".join(map(str, numbers)) for name, numbers in lists.items()}, None])
        try:
            answers = within(self._timeout + _STORE_GRACE, lambda: self._exchange(number, mine, True, None))
        except (TimeoutError, RuntimeError):
            return statements
        if answers is None:
            return statements
        told = {rank: dict(statement) for rank, statement in statements.items()}
        for name in lists:
            place, values = first_difference(
                name, {rank: words[name].split() for rank, (words, _) in answers.items()}
            )
            for rank, value in values.items():
                del told[rank][name]
                told[rank][place] = value
        return told

    def _exchange(
        self, number: int, mine: str, wait: bool, expected: _Signature | None
    ) -> dict[int, _Answer] | None:
        """Tell what this rank does and, with `wait`, read what all do; None if some do not come in time."""
        self._store.set(self._key(number, self._rank), mine)
        if not wait:
            return None
        keys = [self._key(number, rank) for rank in self._ranks]
        quiet = min(_QUIET, self._timeout)
        if not self._come(keys, quiet):
            if quiet == self._timeout:
                return None
            self._say_who_is_missed(number, expected, quiet)
            if not self._come(keys, self._timeout - quiet):
                return None
        answers = dict(zip(self._ranks, map(json.loads, self._store.multi_get(keys)), strict=True))
        # Everybody has now read round number - 1: this rank's entry in it is not needed any more.
        if number > 0:
            self._store.delete_key(self._key(number - 1, self._rank))
        return answers

    def _come(self, keys: list[str], seconds: float) -> bool:
        """Whether all ranks tell what they do within so many seconds."""
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def _say_who_is_missed(self, number: int, expected: _Signature | None, seconds: float) -> None:
        """Long before the timeout, by one rank of those that wait."""
        present, text = self._absent(number, expected, seconds)
        if self._rank == present[0] and len(present) < len(self._ranks):
            _log.warning("rank %d waits for up to %g s more. %s", self._rank, self._timeout - seconds, text)

    def _absent(self, number: int, expected: _Signature | None, seconds: float) -> tuple[list[int], str]:
        """Who has come, and what is to be said of the others after so many seconds."""
        present = self._present(number)
        absent = [rank for rank in self._ranks if rank not in present]
        usual = None if expected is None else (expected[0], dict(expected[1:]))
        return present, absence(self._call, self._words, usual, present, absent, seconds)
