"""What is wrong with a call on one rank, kept until all ranks know of it."""

from __future__ import annotations

from types import TracebackType
from typing import NoReturn


class Trouble:
    """Holds the first exception of the blocks that it is entered for with ``with``, which end there, so that
    the other ranks do not wait for this one.

    Variables must not hold the exception: it refers to the frames that it comes through, so these would keep
    each other alive, with all tensors of the call and the threads of its groups, until the garbage collector
    comes by.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None

    def __bool__(self) -> bool:
        """Whether anything is wrong."""
        return self._error is not None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._error = self._error or error
        return True

    @property
    def words(self) -> tuple[str, str] | None:
        """Type and text, None if nothing is wrong."""
        return None if self._error is None else (type(self._error).__name__, str(self._error))

    def let_out(self, cause: Exception | None = None) -> NoReturn:
        """Raise it and forget it."""
        assert self._error is not None
        try:
            raise self._error from cause
        finally:
            self._error = cause = None
