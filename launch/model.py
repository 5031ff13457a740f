"""A Llama-style decoder over bytes whose attention is a function passed in.

Shapes: B batch, L rows this rank holds, H query heads, H_kv key/value heads, D head size. All layers but
attention work on each row alone, so the model does not know that its rows are part of a longer sequence: it
is told their global positions, and the attention it is given does the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

# (q [B, L, H, D], k [B, L, H_kv, D], v [B, L, H_kv, D]) -> out [B, L, H, D], causal
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

BYTES = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder: `dim` is a multiple of `heads`, `heads` of `kv_heads`, the head size is even."""

    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    vocabulary: int = BYTES
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = True

    def __post_init__(self) -> None:
        for name in ("dim", "layers", "heads", "kv_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dim % self.heads:
            raise ValueError(f"dim {self.dim} is not a multiple of heads {self.heads}; change one of the two")
        if self.head_dim % 2:
            raise ValueError(
                f"the head size dim / heads = {self.head_dim} is odd; rotary positions need pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}; change one of them"
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 of `dim`; three matrices then cost what two of 4 `dim` do."""
        return -(-8 * self.dim // 3 // 16) * 16


@dataclass(frozen=True)
class Rotary:
    """cos and sin of the rotation angles, [L, 1, D/2] each."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, head_dim: int, base: float) -> "Rotary":
        """Angles of the global `positions`, int [L]; in fp64, as fp32 loses those of far positions."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
        angles = torch.outer(positions.to(torch.float64), base**-exponents)
        return cls(angles.cos()[:, None], angles.sin()[:, None])

    def __call__(self, x: Tensor) -> Tensor:
        """Turn each pair (x[i], x[i + D/2]) of x [B, L, H, D] by its angle."""
        kind = torch.promote_types(x.dtype, torch.float32)
        cos, sin = self.cos.to(kind), self.sin.to(kind)
        left, right = x.to(kind).chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Attention, then a gated feed-forward layer, each behind a norm and beside a residual path."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_dim = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.query = nn.Linear(config.dim, config.dim, bias=False)
        self.key = nn.Linear(config.dim, kv_dim, bias=False)
        self.value = nn.Linear(config.dim, kv_dim, bias=False)
        self.output = nn.Linear(config.dim, config.dim, bias=False)
        self.feed_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, attention: Attention) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            rearrange(project(h), "b l (h d) -> b l h d", d=self.head_dim)
            for project in (self.query, self.key, self.value)
        )
        out = attention(rotary(q), rotary(k), v)
        x = x + self.output(rearrange(out, "b l h d -> b l (h d)"))
        h = self.feed_norm(x)
        fed: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return fed


class Decoder(nn.Module):
    """ids [B, L] and their global positions [L] -> logits [B, L, vocabulary]."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.initialise(seed)

    def initialise(self, seed: int) -> None:
        """Weights from `seed` alone, so that every rank starts from the same bits without a broadcast."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.dim() < 2:
                    continue
                scale = self.config.dim**-0.5
                if name.endswith(("output.weight", "down.weight")):
                    scale *= (2 * self.config.layers) ** -0.5  # so that the residual path keeps its size
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            self.norm.weight.fill_(0.5)  # the first guess is then near uniform

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        rotary = Rotary.at(positions, self.config.head_dim, self.config.rope_base)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, rotary, attention)
        logits: Tensor = self.head(self.norm(x))
        return logits
