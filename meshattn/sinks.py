"""Attention sinks: one logit a query head that takes part in the softmax of every row and has no value.

With s the logit of a head, a row of attention over keys alone (out, lse) becomes

    lse' = log(exp(lse) + exp(s)),    out' = out * exp(lse - lse').

So a sink is added once, where a row is complete: on its owner, whatever ranks and tiles there are, and no
kernel knows of it. Backward everything works with out' and lse', and the gradient of the logit is that of a
key whose value is 0: the sum over the rows of exp(s - lse') * (0 - delta).

A row that sees no key keeps out 0 and lse -inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def add_sinks(partial: Mapping[str, Tensor], sinks: Tensor) -> None:
    """In place on a complete accumulator: ``out`` [B, C, H, D_v] and ``lse`` [B, H, C]; sinks [H]."""
    out, lse = partial["out"], partial["lse"]
    logits = sinks.detach().to(lse.dtype).view(1, -1, 1)
    with_sink = torch.logaddexp(lse, logits).masked_fill_(lse == -math.inf, -math.inf)
    factor = torch.exp(lse - with_sink).masked_fill_(lse == -math.inf, 0.0)
    out.mul_(factor.transpose(1, 2).unsqueeze(-1))  # a finished out is rounded once more, the factor is not
    lse.copy_(with_sink)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[H] in the type of sinks: what the rows of this rank give.

    lse and delta [B, H, C] of the rows with their sinks; delta is 0 or finite where lse is -inf.
    """
    logits = sinks.detach().to(lse.dtype).view(1, -1, 1)
    p = torch.exp(logits - lse)
    return -(p * delta).masked_fill_(lse == -math.inf, 0.0).sum((0, 2)).to(sinks.dtype)
