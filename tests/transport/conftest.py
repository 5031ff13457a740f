"""What the tests of transports leave behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shuffled_ranks import MADE


@pytest.fixture(autouse=True)
def _no_watch_outlives_its_test() -> Iterator[None]:
    """Some tests leave exchanges that never end, for which a watch would end the process."""
    yield
    while MADE:
        MADE.pop().close()
