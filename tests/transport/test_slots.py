"""Where slots and flags lie."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from meshattn.transport.slots import ALIGNMENT, SlotLayout, grown

COUNTS = st.integers(1, 40)
RANKS = 5
SIZES = st.integers(1, 10**12)


@given(COUNTS, st.integers(1, 5000))
def test_slots_and_flags_do_not_overlap(slots: int, nbytes: int) -> None:
    layout = SlotLayout.of(slots, nbytes, RANKS)
    places = [(layout.data(k), layout.data(k) + nbytes) for k in range(slots)]
    flags = [layout.ready(k) for k in range(slots)]
    flags += [layout.granted(rank, k) for rank in range(RANKS) for k in range(slots)]
    places += [(flag, flag + 4) for flag in flags]
    places.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert places[0][0] >= 0 and places[-1][1] <= layout.nbytes
    assert all(layout.data(k) % ALIGNMENT == 0 for k in range(slots))
    assert all(flag % 4 == 0 for flag in flags)


@given(COUNTS, SIZES)
def test_a_first_layout_wastes_next_to_nothing(slots: int, nbytes: int) -> None:
    layout = SlotLayout.of(slots, nbytes, RANKS)
    assert layout.holds(slots, nbytes) and not layout.holds(slots + 1, nbytes)
    assert (
        slots * nbytes <= layout.nbytes <= slots * (nbytes + ALIGNMENT) + (1 + RANKS) * 4 * slots + ALIGNMENT
    )


@given(COUNTS, SIZES, COUNTS, SIZES)
def test_a_grown_layout_holds_both(slots: int, nbytes: int, more: int, larger: int) -> None:
    layout = SlotLayout.of(slots, nbytes, RANKS).grown_to(more, larger)
    assert layout.holds(slots, nbytes) and layout.holds(more, larger)
    assert layout.slots == max(slots, more)


@given(SIZES)
def test_growth_is_at_most_an_eighth_and_takes_few_sizes(nbytes: int) -> None:
    size = grown(nbytes)
    assert nbytes <= size < nbytes + max(ALIGNMENT, nbytes / 8 + 1)
    assert grown(size) == size


def test_slow_growth_allocates_seldom() -> None:
    layout, sizes = SlotLayout.of(1, 10_000, RANKS), set()
    for nbytes in range(10_000, 40_000, 7):
        if not layout.holds(1, nbytes):
            layout = layout.grown_to(1, nbytes)
            sizes.add(layout.slot_bytes)
    assert len(sizes) <= 18
