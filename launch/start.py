"""Start ranks of train.py on this machine, as torchrun does: `start.py RANKS [options of train.py]`.

torchrun answers a rank's mistake in an option with thirty lines about processes. Here options are read before
any rank starts, and of ranks that end badly one line says which and how, behind what they said themselves.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from options import choose_tile, parse

TRAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
USERS_MISTAKE = 2  # train.py has said what is wrong


def main(arguments: Sequence[str]) -> int:
    ranks, options = int(arguments[0]), list(arguments[1:])
    try:
        choose_tile(parse(options), ranks)
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return USERS_MISTAKE
    # What it logs about ranks that fail is said below.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    elastic: Any = torchrun
    try:
        elastic.run(elastic.parse_args(["--standalone", f"--nproc-per-node={ranks}", TRAIN, *options]))
    except ChildFailedError as error:
        return report(error)
    return 0


def report(error: ChildFailedError) -> int:
    """Say which rank ended first and how, unless it was with a message of train.py; its exit code."""
    rank, failure = error.get_first_failure()
    if failure.exitcode == USERS_MISTAKE:
        return USERS_MISTAKE
    how = f"with code {failure.exitcode}"
    if failure.exitcode < 0:
        how = f"by signal {signal.Signals(-failure.exitcode).name}"
    print(f"train.py: rank {rank} ended {how}; its own words are above", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
