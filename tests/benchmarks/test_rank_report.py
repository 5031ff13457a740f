"""What the report of several ranks compares with what."""

from __future__ import annotations

import pytest

from across_ranks.rank_report import awake_bases
from across_ranks.rank_turns import Turn


@pytest.mark.parametrize(
    ("name", "bases"),
    [
        ("1x2 symmetric", ("1x2 skipped awake", "one GPU awake")),
        ("1x2 p2p", ("1x2 skipped awake", "one GPU awake")),
        ("2x1 p2p", (None, "one GPU awake")),
        ("1x2 symmetric graph", (None, None)),
        ("1x2 skipped", (None, None)),
        ("1x2 skipped awake", (None, None)),
        ("one GPU", (None, None)),
        ("torch cudnn", (None, None)),
    ],
)
def test_only_eager_tiles_with_transfers_are_compared_with_what_is_kept_awake(
    name: str, bases: tuple[str | None, str | None]
) -> None:
    turns: dict[str, list[Turn]] = {"1x2 skipped awake": [], "one GPU awake": [], name: []}
    assert awake_bases(name, turns) == bases
    assert awake_bases(name, {name: []}) == (None, None)
