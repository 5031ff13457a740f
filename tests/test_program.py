"""A step list as one rank sees it: what its transfers say of slots and of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshattn as ma
from meshattn.mesh import AXES
from meshattn.plan.assignment import Assignment, Tile
from meshattn.program import Program
from meshattn.testing import run_ranks
from meshattn.transport.base import Message
from meshattn.transport.connect import Connection


def programs_on(mesh: ma.AttentionMesh) -> list[Program]:
    """Of a forward and a backward pass."""
    seq = mesh.sequence(29)
    x = torch.zeros(1, seq.rows, 6, 8, requires_grad=True)
    ma.mesh_attention(x, x, x, seq, causal=True)
    (ready,) = seq.ready.values()
    return [ready.call.inner.forward, ready.call.inner.backward]


@pytest.mark.parametrize("tile", [Tile(1, 6), Tile(6, 1), Tile(3, 3)], ids=str)
def test_a_slot_is_said_to_be_filled_again_where_it_is(tile: Tile) -> None:
    """A transport that is told so too late lets a chunk be overwritten, and too early keeps its events."""
    found = set()
    by_rank = run_ranks(tile.ranks, lambda group: programs_on(ma.init_attention_mesh(group, tile=tile)))
    for program in (each for programs in by_rank for each in programs):
        last: dict[tuple[str, int], bool] = {}
        for message in (move.message for step in program.steps for move in step.moves):
            if message.made:
                assert not message.again
                continue
            slot = message.axis, message.slot
            assert last.get(slot, True), f"{message.label}: the transfer before it into the same slot"
            last[slot] = message.again
            found.add(message.again)
        assert not any(last.values()), "nobody fills a slot after the last transfer"
    assert found == ({False, True} if 1 in (tile.a, tile.b) else {False})


@pytest.mark.parametrize(("heads", "tile"), [(1, Tile(2, 3)), (2, Tile(2, 2)), (3, Tile(1, 2))], ids=str)
def test_transports_are_chosen_for_the_ranks_that_exchange(heads: int, tile: Tile) -> None:
    """Whether copy engines serve an axis is looked up in its ring: from whom each rank receives."""

    def on_rank(group: Any) -> tuple[dict[str, tuple[int, ...]], list[Message]]:
        mesh = ma.init_attention_mesh(group, tile=tile, heads=heads)
        rings = {axis: mesh._ring(Assignment(tile), axis) for axis in AXES}
        return rings, [
            move.message for each in programs_on(mesh) for step in each.steps for move in step.moves
        ]

    for rank, (rings, messages) in enumerate(run_ranks(heads * tile.ranks, on_rank)):
        assert messages
        for message in messages:
            assert message.source == rings[message.axis][rank], message.label
            assert rings[message.axis][message.to] == rank, message.label


def test_a_mesh_that_is_closed_twice_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(Connection, "close", lambda self: closed.append(self.rank))

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        mesh.close()
        mesh.close()

    run_ranks(2, on_rank)
    assert sorted(closed) == [0, 1]
