"""A step list as one rank sees it: what its transfers say of the slots that they fill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshattn as ma
from meshattn.plan.assignment import Tile
from meshattn.program import Program
from meshattn.testing import run_ranks


def programs(tile: Tile) -> list[list[Program]]:
    """Of a forward and a backward pass, by rank."""

    def on_rank(group: Any) -> list[Program]:
        seq = ma.init_attention_mesh(group, tile=tile).sequence(29)
        x = torch.zeros(1, seq.rows, 2, 8, requires_grad=True)
        ma.mesh_attention(x, x, x, seq, causal=True)
        (ready,) = seq.ready.values()
        return [ready.call.inner.forward, ready.call.inner.backward]

    return run_ranks(tile.ranks, on_rank)


@pytest.mark.parametrize("tile", [Tile(1, 6), Tile(6, 1), Tile(3, 3)], ids=str)
def test_a_slot_is_said_to_be_filled_again_where_it_is(tile: Tile) -> None:
    """A transport that is told so too late lets a chunk be overwritten, and too early keeps its events."""
    found = set()
    for program in (each for by_rank in programs(tile) for each in by_rank):
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
