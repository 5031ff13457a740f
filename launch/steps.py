"""One training step over the ranks of a mesh, so that its loss and gradients are those of a single rank."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshattn as ma
from model import Attention, Decoder

KINDS: dict[str, Callable[..., object]] = {
    "mesh": ma.mesh_attention,
    "ring": ma.ring_attention,
    "single": ma.mesh_attention,
}


class Refused(ValueError):
    """Attention does not take what it is given, as all ranks find together."""


def make_attention(kind: str, seq: ma.ShardedSequence, window: int = -1, **options: Any) -> Attention:
    """Causal attention over the whole sequence, from this rank's rows.

    Args:
        window: keys that a token sees before its own, -1 for all of them.
        options: others of ``mesh_attention``.
    """
    attend = KINDS[kind]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            out = attend(q, k, v, seq, causal=True, window_size=(window, -1), **options)
        except ValueError as error:
            raise Refused(str(error)) from error
        assert isinstance(out, Tensor)
        return out

    return attention


@dataclass(frozen=True)
class StepResult:
    """Of all ranks together: mean loss a token, and tokens that had a label."""

    loss: float
    tokens: int


def compute_gradients(
    model: Decoder,
    ids: Tensor,
    seq: ma.ShardedSequence,
    attention: Attention,
    autocast: torch.dtype | None = None,
) -> StepResult:
    """Set the gradients of all weights to those of the mean loss over all tokens of all ranks.

    Args:
        ids: int64 [B, S], the whole sequences, the same on every rank.
        autocast: type to run in, None for that of the weights.
    """
    device = ids.device
    with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
        logits = model(seq.shard(ids, dim=1), seq.position_ids(device), attention)
    labels = seq.shift_labels(ids, dim=1)
    # Ranks hold different numbers of labels, so a mean of their means would weigh tokens differently.
    kind = torch.promote_types(logits.dtype, torch.float32)
    loss = F.cross_entropy(logits.flatten(0, 1).to(kind), labels.flatten(), reduction="sum")
    total = torch.stack([loss.detach().double(), (labels >= 0).sum().double()])
    dist.all_reduce(total)
    model.zero_grad(set_to_none=True)
    total[1].clamp_(min=1.0)  # documents of one token have no label
    (loss / total[1]).backward()  # type: ignore[no-untyped-call]
    sum_gradients(model)
    return StepResult(loss=float(total[0] / total[1]), tokens=int(total[1]))


def sum_gradients(model: nn.Module) -> None:
    """Add the gradients of all ranks in one message; afterwards every rank has the same bits."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def make_optimizer(model: nn.Module, *, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms alone."""
    weights = list(model.parameters())
    groups = [
        {"params": [weight for weight in weights if weight.dim() >= 2], "weight_decay": weight_decay},
        {"params": [weight for weight in weights if weight.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def warmed_up(lr: float, step: int, warmup: int) -> float:
    """Learning rate of step 0, 1, ..: a ramp over `warmup` steps, then `lr`."""
    return lr * min(1.0, (step + 1) / (warmup + 1))
