"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from meshattn.plan.cost import HEAD_DIM_STEP

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


def size(text: str) -> int:
    """A number, or one with K, M or G behind it: 128k is 131072."""
    unit = text[-1:].lower()
    number, unit = (text[:-1], unit) if unit in UNITS and unit else (text, "")
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 131072, 128k or 1M") from None
    if not math.isfinite(value) or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def check_head_dim(head_dim: int) -> None:
    """ValueError for one that attention does not take."""
    if head_dim < 1 or head_dim % HEAD_DIM_STEP:
        raise ValueError(f"--head-dim is {head_dim}, but must be a multiple of {HEAD_DIM_STEP}")


def check_folder(name: str, path: Path | None) -> None:
    """Before the work, so that it is not lost."""
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"--{name} {path}: there is no folder {path.parent}")
