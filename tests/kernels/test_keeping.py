"""Tables that caches forget are found again as long as somebody keeps them."""

from __future__ import annotations

from meshattn_kernels.keeping import Tables, keep, keeping


class _Table:
    pass


def test_the_last_tables_and_those_that_are_kept_are_found_again() -> None:
    tables: Tables[_Table] = Tables(3)
    with keeping() as kept:
        keep(tables.get(0, _Table))
    forgotten = id(tables.get(1, _Table))
    last = [tables.get(key, _Table) for key in (2, 3, 4)]
    assert [tables.get(key, _Table) for key in (2, 3, 4)] == last
    assert tables.get(0, _Table) is kept[0]
    made = []
    tables.get(1, lambda: made.append(forgotten) or _Table())
    assert made, "nobody kept it"


def test_what_was_used_last_stays() -> None:
    tables: Tables[_Table] = Tables(2)
    first = id(tables.get("a", _Table))
    tables.get("b", _Table)
    for key in "cdef":
        assert id(tables.get("a", _Table)) == first
        tables.get(key, _Table)
