"""Times of turns: those of the slowest rank, of each pass and of both together."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from across_ranks import rank_turns


def test_a_step_takes_as_long_as_that_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank waits in its forward pass for another, which waits in the backward pass."""
    ours, theirs = (3.0, 5.0, 1.0), (4.0, 2.0, 6.0)  # forward, backward, host

    def all_reduce(tensor: Tensor, op: Any) -> None:
        assert op == dist.ReduceOp.MAX
        forward, backward, host = theirs
        torch.maximum(tensor, torch.tensor([forward, backward, forward + backward, host]), out=tensor)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(rank_turns, "_cpu_times", lambda *_: ours)
    contender: Any = object()
    turn = rank_turns._turn(contender, torch.device("cpu"), 3)
    assert turn == rank_turns.Turn(forward=4.0, backward=5.0, both=8.0, host=6.0)


def test_every_round_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next: of each contender one turn more."""

    class Idle:
        def __init__(self, name: str) -> None:
            self.name = name

        def entered(self) -> contextlib.nullcontext[None]:
            return contextlib.nullcontext()

    turn = rank_turns.Turn(forward=1.0, backward=2.0, both=3.0, host=0.5)
    monkeypatch.setattr(rank_turns, "_turn", lambda *_: turn)
    contenders: list[Any] = [Idle(name) for name in "abc"]
    kept: list[dict[str, int]] = []
    rank_turns.in_turns(
        contenders,
        torch.device("cpu"),
        rounds=3,
        turn_ms=9.0,
        after=lambda turns: kept.append({name: len(done) for name, done in turns.items()}),
    )
    assert kept == [dict.fromkeys("abc", rounds) for rounds in (1, 2, 3)]
