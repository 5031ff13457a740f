"""What the checks of one rank have in common: which transports there are, and how it speaks."""

from __future__ import annotations

import argparse

import torch.distributed as dist

LONGEST_DELAY = 1_500_000  # clock cycles, a little less than a millisecond


def transports(options: argparse.Namespace) -> tuple[str, ...]:
    """Those that the ranks can use."""
    return ("symmetric", "p2p") if options.nccl else ("symmetric",)


def say(text: str) -> None:
    print(f"[{dist.get_rank()}] {text}", flush=True)
