"""Cuts by name, and which are timed."""

from __future__ import annotations

import pytest

from across_ranks.rank_cuts import chosen_cuts, cut_of, name_of
from meshattn.plan import CallShape, Tile
from meshattn.plan.placement import Cut
from meshattn.plan.planner import cuts
from programs import BENCHMARKS, module_of

SHAPE = CallShape(1, 16, 12, 4, 8, 8, 2, 4, 4, True)


def test_every_cut_has_a_name_of_its_own_that_leads_back_to_it() -> None:
    every = list(cuts(12, SHAPE))
    assert [cut_of(name_of(cut)) for cut in every] == every
    assert len({name_of(cut) for cut in every}) == len(every)
    assert name_of(Cut(1, Tile(3, 4))) == "3x4"
    assert name_of(Cut(2, Tile(3, 2))) == "2x3x2"


@pytest.mark.parametrize("name", ["", "4", "2x", "x2x2", "2x2x2x2", "ax2x3", "0x2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="tile"):
        cut_of(name)


def test_ring_is_always_timed_and_first_and_nothing_twice() -> None:
    ring = Cut(1, Tile(1, 12))
    for wanted in ([], ["3x4"], ["3x4", "1x12", "3x4"], ["auto"]):
        for head_axis in (False, True):
            chosen = chosen_cuts(wanted, 12, SHAPE, None, head_axis=head_axis)
            assert chosen[0] == ring and len(set(chosen)) == len(chosen)
            assert all(cut_of(name) in chosen for name in wanted if name != "auto")
    assert {cut.heads for cut in chosen_cuts([], 12, SHAPE, None, head_axis=False)} == {1}
    assert set(chosen_cuts([], 12, SHAPE, None, head_axis=True)) == set(cuts(12, SHAPE))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--head-axis --tile 2x2", "--head-axis is for all tiles"),
        ("--topology dgx-h200", "add --tile auto"),
        ("--topology dgx-h200 --tile 2x2", "add --tile auto"),
        ("--graph symmetric --transport p2p", "--graph symmetric: name it in --transport"),
        ("--rounds 0", "--rounds is 0"),
        ("--seq-len 8 0", "all must be at least 1"),
    ],
)
def test_no_option_is_ignored(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parse = module_of(BENCHMARKS / "distributed.py").parse
    with pytest.raises(SystemExit):
        parse(given.split())
    assert message in capsys.readouterr().err
    assert parse(["--topology", "dgx-h200", "--tile", "auto", "--graph", "p2p"]).graph == ["p2p"]
