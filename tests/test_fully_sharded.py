"""Data-parallel groups of meshes under PyTorch's fully sharded wrapper, as docs/training.md shows it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import meshattn as ma
from meshattn.testing import run_ranks

S, H, H_KV, D, VOCAB, ROWS = 37, 4, 2, 8, 11, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H * D)
        self.qkv = nn.Linear(H * D, (H + 2 * H_KV) * D)
        self.head = nn.Linear(H * D, VOCAB)

    def forward(self, ids: Tensor, seq: ma.ShardedSequence) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).split((H, H_KV, H_KV), dim=2)
        return self.head(x + ma.mesh_attention(q, k, v, seq, causal=True).flatten(2))


def gradients(data: int) -> dict[str, Tensor]:
    """Whole gradients of one batch of 2 rows, shared by ``data`` groups."""
    world = dist.get_world_size()
    torch.manual_seed(3)
    model = Block()
    batch = torch.randint(VOCAB, (2, ROWS, S))
    axes = init_device_mesh("cpu", (data, world // data), mesh_dim_names=("data", "context"))
    mesh = ma.init_attention_mesh(axes["context"], timeout=30)
    fully_shard(model)
    seq = mesh.sequence(S)
    total = torch.zeros(())
    losses = []
    for ids in batch.tensor_split(data)[axes.get_local_rank("data")]:
        labels = seq.shift_labels(ids, dim=1)
        logits = model(seq.shard(ids, dim=1), seq)
        losses.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
        total += (labels >= 0).sum()
    dist.all_reduce(total)
    (sum(losses) * world / total).backward()  # type: ignore[union-attr]
    return {name: weight.grad.full_tensor() for name, weight in model.named_parameters()}


def test_gradients_are_those_of_one_rank() -> None:
    (alone,) = run_ranks(1, lambda _: gradients(1), backend="gloo", timeout=60)
    for got in run_ranks(4, lambda _: gradients(2), backend="gloo", timeout=60):
        for name, expected in alone.items():
            torch.testing.assert_close(got[name], expected, msg=lambda text, name=name: f"{name}: {text}")
