"""How the error of out and gradients grows with the number of ranks, for both types in which partial results
travel: bfloat16 inputs, causal, on a simulated group, against dense attention in float64.

    python benchmarks/error_growth.py                    the table of docs/accuracy.md, in some two minutes

An error is the root mean square of the difference, relative to that of the exact result.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import meshattn as ma
from meshattn import reference
from meshattn.plan import Tile
from meshattn.testing import run_ranks

NAMES = ("out", "dq", "dk", "dv")
SEEDS = (0, 1, 2)
BATCH, SEQ_LEN, HEADS, KV_HEADS, HEAD_DIM = 1, 1000, 4, 2, 64
TILES = tuple(map(Tile.parse, ("1x1", "1x2", "2x2", "1x4", "2x4", "1x8", "8x1", "4x4", "1x16")))


def inputs(seed: int) -> list[Tensor]:
    """q, k, v and do in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(BATCH, SEQ_LEN, h, HEAD_DIM, generator=generator).bfloat16() for h in heads]


def exact(seed: int) -> list[Tensor]:
    """out, dq, dk, dv in float64."""
    *leaves, do = (x.double() for x in inputs(seed))
    q, k, v = (x.requires_grad_() for x in leaves)
    out, _ = reference.attention(q, k, v, causal=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def on_ranks(tile: Tile, reduce_dtype: torch.dtype, seed: int) -> list[Tensor]:
    """The same of a simulated group."""

    def on_rank(group: Any) -> list[Tensor]:
        seq = ma.init_attention_mesh(group, tile=tile).sequence(SEQ_LEN)
        *leaves, do = (seq.shard(x) for x in inputs(seed))
        q, k, v = (x.requires_grad_() for x in leaves)
        out = ma.mesh_attention(q, k, v, seq, causal=True, reduce_dtype=reduce_dtype)
        assert isinstance(out, Tensor)
        results = (out, *torch.autograd.grad(out, (q, k, v), do))
        return [seq.unshard(x.detach()).double() for x in results]

    return run_ranks(tile.ranks, on_rank, timeout=300.0)[0]


def errors(tile: Tile, reduce_dtype: torch.dtype, references: dict[int, list[Tensor]]) -> dict[str, float]:
    """By name of the result: the error over the seeds of ``references``, whose exact results it holds."""
    found = {}
    answers = {seed: on_ranks(tile, reduce_dtype, seed) for seed in references}
    for number, name in enumerate(NAMES):
        wrong = sum(float((answers[s][number] - references[s][number]).square().mean()) for s in references)
        right = sum(float(references[s][number].square().mean()) for s in references)
        found[name] = (wrong / right) ** 0.5
    return found


def table() -> str:
    references = {seed: exact(seed) for seed in SEEDS}
    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    found = {(tile, kind): errors(tile, dtype, references) for tile in TILES for kind, dtype in kinds.items()}
    lines = [
        "| ranks | tile | " + " | ".join(f"{name}, {kind}" for kind in kinds for name in NAMES) + " |",
        "|---" * (2 + len(kinds) * len(NAMES)) + "|",
    ]
    for tile in TILES:
        cells = [
            f"{found[tile, kind][name] / found[TILES[0], 'float32'][name]:.2f}"
            for kind in kinds
            for name in NAMES
        ]
        lines.append(f"| {tile.ranks} | {tile} | " + " | ".join(cells) + " |")
    alone = ", ".join(f"{name} {value:.2e}" for name, value in found[TILES[0], "float32"].items())
    return "\n".join([*lines, "", f"The unit, the error on one rank: {alone}."])


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    print(table())
