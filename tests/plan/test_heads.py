"""The head axis in closed form: how heads are shared out, what moves, how many groups."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from meshattn.plan.cost import CallShape
from meshattn.plan.heads import (
    GROUP_COST,
    HeadSplit,
    exchange,
    exchange_memory,
    head_groups,
    inner_shape,
    message_bytes,
)

SHAPE = CallShape(
    batch=3,
    rows=1024,
    heads=24,
    kv_heads=6,
    head_dim=64,
    head_dim_v=128,
    itemsize=2,
    reduce_itemsize=4,
    acc_itemsize=4,
    causal=True,
    key_rows=512,
)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6], ids="g{}".format)
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 5, 8], ids="H_kv{}".format)
def test_every_head_has_one_place_and_its_keys_with_it(kv_heads: int, group: int) -> None:
    """For every axis that divides the heads: the head of a copy is that of each of its query heads, no fewer
    copies would do, and where the key/value heads divide there are none."""
    heads = kv_heads * group
    for ranks in (w for w in range(1, heads + 1) if heads % w == 0):
        split = HeadSplit.of(heads, kv_heads, ranks)
        assert split.heads * ranks == heads
        assert split.kv_heads * ranks == kv_heads * split.copies
        local_group, rest = divmod(split.heads, split.kv_heads)
        assert rest == 0
        for place, local in itertools.product(range(ranks), range(split.heads)):
            copy = place * split.kv_heads + local // local_group
            assert copy // split.copies == (place * split.heads + local) // group
        assert (split.copies == 1) == (kv_heads % ranks == 0)
        fewer = range(1, split.copies)
        assert not any(group % n == 0 and kv_heads * n % ranks == 0 for n in fewer)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"q has 6 heads, which the 4 ranks .* cannot share equally"):
        HeadSplit.of(6, 2, 4)


def test_the_call_inside_has_all_rows_and_a_part_of_the_heads() -> None:
    inside = inner_shape(SHAPE, 3, 2)
    assert (inside.rows, inside.key_rows, inside.heads, inside.kv_heads) == (3072, 1536, 4, 1)
    assert inner_shape(SHAPE, 1) == SHAPE
    outside, whole = (x.query_rows * x.chunk_keys for x in (SHAPE, inner_shape(SHAPE, 3)))
    assert whole == 3 * outside, "w times the keys for the same query rows times heads"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 12, 24], ids="w{}".format)
def test_bytes_by_hand(ranks: int) -> None:
    """Every element of q, out, do and dq that is not this rank's own is sent once, those of keys and values
    once a copy; more groups send the same in more messages."""
    split = HeadSplit.of(24, 6, ranks)
    rows, others = 3 * 1024 * 24, ranks - 1
    keys, wide = 3 * 512 * 6 * split.copies, 64 + 128
    partial = 2 if split.copies == 1 else 4
    by_hand = {
        ("forward", "inward"): others * (rows * 64 * 2 + keys * wide * 2) // ranks,
        ("forward", "outward"): others * rows * (128 * 2 + 4) // ranks,
        ("backward", "inward"): others * rows * (128 * 2 + 4) // ranks,
        ("backward", "outward"): others * (rows * 64 * 2 + keys * wide * partial) // ranks,
    }
    for direction in ("forward", "backward"):
        for groups in (n for n in range(1, split.kv_heads + 1) if split.kv_heads % n == 0):
            for way, part in exchange(direction, SHAPE, ranks, groups).items():
                assert part.num_bytes == by_hand[direction, way]
                assert part.num_messages == groups * others


def test_memory_of_the_messages_falls_with_the_groups() -> None:
    whole, third = (exchange_memory("forward", SHAPE, 2, groups) for groups in (1, 3))
    size = message_bytes("forward", SHAPE, 2)
    assert whole == sum(size.values()) + max(size.values())
    assert third == 2 * sum(size.values()) // 3
    assert exchange_memory("forward", SHAPE, 1) == 0


def test_groups_follow_from_what_is_left_exposed() -> None:
    """More groups for more bytes, always a divisor of the key/value heads, none where nothing moves."""
    shape = replace(SHAPE, batch=1, heads=32, kv_heads=32, head_dim_v=64)
    lengths = [2**n for n in range(8, 20)]
    found = [head_groups(replace(shape, rows=rows, key_rows=rows), 2) for rows in lengths]
    assert found == sorted(found) and found[0] == 1 and found[-1] == 16
    assert all(16 % groups == 0 for groups in found)
    for rows, groups in zip(lengths, found, strict=True):
        moved = replace(shape, rows=rows, key_rows=rows)
        num_bytes = sum(part.num_bytes for part in exchange("forward", moved, 2).values())
        for other in (1, 2, 4, 8, 16):
            assert num_bytes // groups + groups * GROUP_COST <= num_bytes // other + other * GROUP_COST
    assert head_groups(replace(shape, rows=2**20), 1) == 1
    assert head_groups(replace(shape, rows=2**20, kv_heads=2), 16) == 1, "one key/value head a rank"
