"""One rank of the tests of transports on GPUs: some checks, one after the other. A failed one ends it with an
error.

transport_ranks.py CHECK .. [--transport T] [--kernel K] [--nccl]
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from gpu.engine_checks import beside, engine, killed, unclosed
from gpu.pass_checks import graph, memory, recorded, repeat
from gpu.race_checks import race
from gpu.rank_talk import say

PASSED = "passed:"
PATIENCE = 100.0  # seconds for a check


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checks", nargs="+", choices=CHECKS)
    parser.add_argument("--transport", default="symmetric", help="of killed, unclosed")
    parser.add_argument("--kernel", default="reference", help="of the same; passes of triton are recorded")
    parser.add_argument("--nccl", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for a check")
    parser.add_argument("--steps", type=int, default=500, help="of training")
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "cpu:gloo,cuda:nccl" if options.nccl else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    for name in options.checks:
        faulthandler.dump_traceback_later(options.patience, exit=True)  # where it stands still
        begin = time.monotonic()
        CHECKS[name](options)
        dist.barrier()
        say(f"{PASSED} {name} after {time.monotonic() - begin:.1f} s")
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


CHECKS = {
    "race": race,
    "engine": engine,
    "killed": killed,
    "graph": graph,
    "recorded": recorded,
    "repeat": repeat,
    "memory": memory,
    "beside": beside,
    "unclosed": unclosed,
}

if __name__ == "__main__":
    main()
