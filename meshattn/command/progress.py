"""How far a command is, for people who wait for it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

PATIENCE = 2.0
"""Seconds that nothing is said, at the start and after something was."""


@dataclass
class Progress:
    """Says on stderr what is done next, once in a while; nothing if the work takes less than `PATIENCE`."""

    doing: str
    last: float = field(default_factory=time.monotonic)

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last >= PATIENCE:
            self.last = now
            print(f"{self.doing}: {text}", file=sys.stderr, flush=True)
