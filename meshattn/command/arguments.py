"""Arguments that several commands take."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from meshattn.plan.cost import HEAD_DIM_STEP

MOST = {"batch": 2**20, "seq-len": 2**40, "rows": 2**24, "heads": 2**12, "head-dim": 2**14}
"""Of what options may say."""
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


def check_most(name: str, value: int, option: str = "") -> None:
    """ValueError for what is no such size; ``name`` is one of `MOST`, and that of the option that gave it if
    ``option`` says no other."""
    if not 1 <= value <= MOST[name]:
        bound = "at least 1" if value < 1 else f"at most {MOST[name]}"
        raise ValueError(f"--{option or name} is {value}, but must be {bound}")


def check_head_dim(head_dim: int) -> None:
    """ValueError for one that attention does not take."""
    check_most("head-dim", head_dim)
    if head_dim % HEAD_DIM_STEP:
        raise ValueError(f"--head-dim is {head_dim}, but must be a multiple of {HEAD_DIM_STEP}")


def check_folder(name: str, path: Path | None) -> None:
    """Before the work, so that it is not lost."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"--{name} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--{name} {path}: this is a folder, but must be a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--{name} {path}: no permission to write here")


def add_window(parser: argparse.ArgumentParser) -> None:
    """The argument that `window_of` reads."""
    parser.add_argument(
        "--window",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="keys seen before and after a query's own, -1 for no bound (the default); causal is RIGHT 0",
    )


def window_of(args: argparse.Namespace) -> tuple[int | None, int | None]:
    """Keys before and after a query's own, None for no bound; ValueError for what is no window."""
    given = " ".join(map(str, args.window))
    if min(args.window) < -1:
        raise ValueError(f"--window is {given}, but -1 is the least: no bound")
    left, right = (None if size == -1 else size for size in args.window)
    if args.causal and right:
        raise ValueError(
            f"--window is {given}, but under a causal mask, the default, RIGHT is 0: give 0 or add "
            "--no-causal"
        )
    return left, 0 if args.causal else right
