"""A bound on calls that may never come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")


def within(seconds: float, ask: Callable[[], _Result]) -> _Result:
    """The answer, or TimeoutError: a store whose host stands still may never return from a plain look, nor
    NCCL from the end of a communicator that CUDA graphs still know."""
    answers: list[_Result | BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError
    (answer,) = answers
    if isinstance(answer, BaseException):
        raise answer
    return answer
