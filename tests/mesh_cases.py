"""Cases of attention on a mesh of ranks, and what dense attention makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cases import Inputs, Results, Shape, dense, make_inputs
from meshattn.layouts import Layout, LayoutKind
from meshattn.plan.assignment import Tile

LAYOUTS: tuple[LayoutKind, ...] = ("striped", "zigzag", "contiguous")
SMALL = Shape(B=1, S=0, H=2, H_kv=1, D=8)


@dataclass(frozen=True)
class Packed:
    """Documents of one side of a call."""

    bounds: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """As ``mesh.sequence`` takes them."""
        return {"cu_seqlens": self.bounds, "document_lengths": self.lengths}

    def positions(self) -> list[int]:
        """Positions that belong to a document."""
        starts = self.bounds[:-1]
        ends = (
            self.bounds[1:]
            if self.lengths is None
            else [x + n for x, n in zip(starts, self.lengths, strict=True)]
        )
        return [position for start, end in zip(starts, ends, strict=True) for position in range(start, end)]

    def __str__(self) -> str:
        slots = ".".join(map(str, self.bounds))
        return slots if self.lengths is None else f"{slots}of{'.'.join(map(str, self.lengths))}"


@dataclass(frozen=True)
class Case:
    """One call of ``mesh_attention`` or ``ring_attention`` and its backward pass; printed, a test id."""

    tile: Tile
    shape: Shape
    layout: LayoutKind = "striped"
    causal: bool = True
    dtype: torch.dtype = torch.float64
    reduce_dtype: torch.dtype | None = None
    softmax_scale: float | None = None
    ring: bool = False
    seed: int = 0
    window_size: tuple[int, int] = (-1, -1)
    documents: Packed | None = None
    kv_layout: LayoutKind | None = None  # of a sequence of shape.S_k keys; None attends to the same sequence
    kv_documents: Packed | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    sinks: bool = False  # those of ``sinks_of``
    strided: bool = False  # inputs and gradients lie in memory with heads before rows
    heads: int = 1  # ranks of the head axis
    head_groups: int | str = "auto"

    @property
    def ranks(self) -> int:
        return self.heads * self.tile.ranks

    @property
    def chunks(self) -> Layout:
        """Which tokens the ranks of each head axis hold together."""
        return self._layout(self.layout, self.shape.S)

    @property
    def key_chunks(self) -> Layout:
        """Which keys they hold."""
        return self.chunks if self.kv_layout is None else self._layout(self.kv_layout, self.shape.seq_len_k)

    def _layout(self, kind: LayoutKind, seq_len: int) -> Layout:
        return Layout(kind, seq_len, self.tile.ranks, self.heads * -(-seq_len // self.ranks))

    def positions(self, layout: Layout, rank: int) -> list[int]:
        """Of the tokens that a rank holds: a run of the rows of its chunk, without padding."""
        chunk, place = divmod(rank, self.heads)
        rows = layout.rows // self.heads
        mine = layout.positions(chunk)[place * rows : (place + 1) * rows]
        return [position for position in mine if position < layout.seq_len]

    @property
    def rule(self) -> dict[str, Any]:
        """The mask as ``meshattn.reference.attention`` takes it."""
        keys = self.documents if self.kv_layout is None else self.kv_documents
        rule: dict[str, Any] = {"causal": self.causal, "window_size": self.window_size}
        for side, packed in (("q", self.documents), ("k", keys)):
            if packed is not None:
                rule |= {f"cu_seqlens_{side}": packed.bounds, f"document_lengths_{side}": packed.lengths}
        return rule

    def __str__(self) -> str:
        heads = f"{self.heads}x" if self.heads > 1 else ""
        words = [f"P{self.ranks}", f"{heads}{self.tile}", self.layout, "causal" if self.causal else "full"]
        words.append(str(self.shape))
        if self.dtype != torch.float64:
            words.append(_name(self.dtype))
        if self.reduce_dtype is not None:
            words.append(f"reduce-{_name(self.reduce_dtype)}")
        if self.softmax_scale is not None:
            words.append(f"scale{self.softmax_scale:g}")
        if self.window_size != (-1, -1):
            words.append("window{},{}".format(*self.window_size))
        if self.head_groups != "auto":
            words.append(f"groups{self.head_groups}")
        if self.softcap:
            words.append(f"softcap{self.softcap:g}")
        if self.dropout_p:
            words.append(f"dropout{self.dropout_p:g}")
        if self.sinks:
            words.append("sinks")
        if self.strided:
            words.append("strided")
        words += [f"docs{packed}" for packed in (self.documents, self.kv_documents) if packed is not None]
        if self.kv_layout is not None:
            words.append(f"keys-{self.kv_layout}")
        return "-".join([*words, "ring"] if self.ring else words)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_length(shape: Shape, seq_len: int) -> Shape:
    """The same sizes for another sequence length."""
    return Shape(shape.B, seq_len, shape.H, shape.H_kv, shape.D, shape.D_v)


@lru_cache(maxsize=64)
def inputs_of(case_shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    return make_inputs(case_shape, dtype, seed)


def sinks_of(case: Case) -> Tensor:
    """[H] in the type of the case."""
    generator = torch.Generator().manual_seed(case.seed)
    return torch.randn(case.shape.H, generator=generator, dtype=torch.float64).to(case.dtype)


def score_options(case: Case) -> dict[str, Any]:
    """What becomes of scores, as arguments of attention, dense or not."""
    return {name: getattr(case, name) for name in ("softmax_scale", "softcap", "dropout_p", "dropout_seed")}


@lru_cache(maxsize=64)
def _dense(case: Case, computed: torch.dtype) -> Results:
    inputs = inputs_of(case.shape, case.dtype, case.seed)
    sinks = sinks_of(case).to(computed) if case.sinks else None
    return dense(inputs, computed, sinks=sinks, **score_options(case), **case.rule)


def _global(case: Case) -> Case:
    """The case without what dense attention does not know, so that results are kept for all of those."""
    same = {"tile": Tile(1, 1), "layout": "striped", "reduce_dtype": None, "ring": False, "strided": False}
    same |= {"heads": 1, "head_groups": "auto"}
    return replace(case, **same, kv_layout=None if case.kv_layout is None else "striped")


def oracle(case: Case) -> Results:
    """Dense attention in float64 on the numbers of the case."""
    return _dense(_global(case), torch.float64)


def eager(case: Case) -> Results:
    """Dense attention in the type of the case."""
    return _dense(_global(case), case.dtype)
