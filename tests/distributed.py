"""The one harness of the distributed tests: run cases on every rank of a group, put the results together.

Padding rows of all inputs hold NaN, so that a row which is read although it is padding shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

import meshattn as ma
from cases import Inputs, Results, Shape, dense, make_inputs
from meshattn.attention import (
    mesh_attention,
    ring_attention,
)  # here, not in every forked rank: it takes seconds
from meshattn.layouts import Layout, LayoutKind
from meshattn.mesh import AttentionMesh
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from tolerance import assert_close

Backend = Literal["threads", "gloo"]
LAYOUTS: tuple[LayoutKind, ...] = ("striped", "zigzag", "contiguous")
PADDING = float("nan")
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


def local_rows(case: Case, rank: int, tensor: Tensor, *, keys: bool = False) -> Tensor:
    """The rows [B, L, ..] of a rank, of queries or of ``keys``. Does without ``ShardedSequence``.

    PADDING in its padding rows and where there are documents and the row belongs to none.
    """
    layout, packed = case.chunks, case.documents
    if keys and case.kv_layout is not None:
        layout, packed = case.key_chunks, case.kv_documents
    positions = case.positions(layout, rank)
    size = layout.rows // case.heads
    rows = tensor.new_full((tensor.shape[0], size, *tensor.shape[2:]), PADDING)
    if packed is not None:
        used = packed.positions()
        tensor = torch.full_like(tensor, PADDING).index_copy(
            1, torch.tensor(used, dtype=torch.int64), tensor[:, used]
        )
    rows[:, : len(positions)] = tensor[:, positions]
    return rows


def build_mesh(group: Any, case: Case, **options: Any) -> AttentionMesh:
    """The mesh of a case."""
    return ma.init_attention_mesh(
        group, tile=case.tile, heads=case.heads, head_groups=case.head_groups, **options
    )


def sequences(mesh: AttentionMesh, case: Case) -> tuple[ma.ShardedSequence, ma.ShardedSequence | None]:
    """``seq`` and ``kv_seq`` of a case."""
    arguments = case.documents.arguments() if case.documents else {}
    seq = mesh.sequence(case.shape.S, layout=case.layout, **arguments)
    if case.kv_layout is None:
        return seq, None
    arguments = case.kv_documents.arguments() if case.kv_documents else {}
    return seq, mesh.sequence(case.shape.seq_len_k, layout=case.kv_layout, **arguments)


def local_inputs(case: Case, rank: int) -> Inputs:
    """One rank's rows of all inputs."""
    inputs = inputs_of(case.shape, case.dtype, case.seed)._asdict()
    return Inputs(**{name: local_rows(case, rank, x, keys=name in "kv") for name, x in inputs.items()})


def run_case(mesh: AttentionMesh, case: Case, *, device: str = "cpu", **options: Any) -> Results:
    """One rank's share of a case, forward and backward: tensors of L rows, always on the CPU."""
    sinks = sinks_of(case).to(device) if case.sinks else None
    results, _ = run_with_sinks(mesh, case, sinks, device=device, **options)
    return results


def run_with_sinks(
    mesh: AttentionMesh, case: Case, sinks: Tensor | None, *, device: str = "cpu", **options: Any
) -> tuple[Results, Tensor | None]:
    """The same with these sinks, and the gradient of theirs that this rank has, if they require one."""
    seq, kv_seq = sequences(mesh, case)
    q, k, v, do = (x.to(device) for x in local_inputs(case, mesh.rank))
    if case.strided:
        q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    call = ring_attention if case.ring else mesh_attention
    answer = call(
        q,
        k,
        v,
        seq,
        kv_seq=kv_seq,
        causal=case.causal,
        window_size=case.window_size,
        sinks=sinks,
        reduce_dtype=case.reduce_dtype,
        return_lse=True,
        **score_options(case),
        **options,
    )
    assert isinstance(answer, tuple)
    out, lse = answer
    wanted = [q, k, v] if sinks is None or not sinks.requires_grad else [q, k, v, sinks]
    dq, dk, dv, *dsinks = torch.autograd.grad(out, wanted, do)
    results = Results(*(result.detach().cpu() for result in (out, lse, dq, dk, dv)))
    return results, dsinks[0].cpu() if dsinks else None


def run_cases(
    cases: Sequence[Case], backend: Backend = "threads", *, timeout: float = 100.0, **options: Any
) -> list[list[Results]]:
    """Run cases of one P in one group, a mesh for each tile. Returns per case the results of all ranks."""
    (ranks,) = {case.ranks for case in cases}
    for case in cases:  # made here, not once in every rank
        inputs_of(case.shape, case.dtype, case.seed)

    def on_rank(group: Any) -> list[Results]:
        meshes: dict[tuple[Any, ...], AttentionMesh] = {}
        results = []
        for case in cases:
            axes = case.heads, case.tile, case.head_groups
            if axes not in meshes:
                meshes[axes] = build_mesh(group, case, timeout=timeout)
            results.append(run_case(meshes[axes], case, **options))
        return results

    by_rank = run_ranks(ranks, on_rank, backend, timeout=timeout)
    return [[results[number] for results in by_rank] for number in range(len(cases))]


def assemble(case: Case, by_rank: Sequence[Results]) -> Results:
    """The global tensors of a case from its ranks' rows, which must hold 0 (lse: -inf) in their padding."""
    shape = case.shape
    heads = {"out": shape.H, "dq": shape.H, "dk": shape.H_kv, "dv": shape.H_kv}
    sizes = {"out": shape.head_dim_v, "dq": shape.D, "dk": shape.D, "dv": shape.head_dim_v}
    whole = {
        name: torch.full(
            (shape.B, _layout_of(case, name).seq_len, heads[name], sizes[name]),
            float("nan"),
            dtype=case.dtype,
        )
        for name in heads
    }
    exact = torch.float64 if case.dtype == torch.float64 else torch.float32
    whole["lse"] = torch.full((shape.B, shape.H, shape.S), float("nan"), dtype=exact)
    assert len(by_rank) == case.ranks
    for rank, results in enumerate(by_rank):
        for name, tensor in results._asdict().items():
            layout = _layout_of(case, name)
            positions = case.positions(layout, rank)
            real, held = len(positions), layout.rows // case.heads
            rows, padding = (2, float("-inf")) if name == "lse" else (1, 0.0)
            assert tensor.dtype == whole[name].dtype, f"{name} of rank {rank} is {tensor.dtype}"
            assert tensor.shape[rows] == held, f"{name} of rank {rank} is {list(tensor.shape)}"
            padded = tensor.narrow(rows, real, held - real)
            assert torch.equal(padded, torch.full_like(padded, padding)), (
                f"{case}: padding rows of {name} on rank {rank} must be {padding}"
            )
            whole[name].index_copy_(
                rows,
                torch.tensor(positions, dtype=torch.int64),
                tensor[:, :real] if rows == 1 else tensor[:, :, :real],
            )
    return Results(**whole)


def _layout_of(case: Case, name: str) -> Layout:
    return case.key_chunks if name in ("dk", "dv") else case.chunks


def assert_equals_oracle(case: Case, by_rank: Sequence[Results]) -> None:
    """All five results on every rank and head: 1e-12 in float64, else by the rule of ``tolerance``."""
    whole, exact = assemble(case, by_rank), oracle(case)
    rounded = None if case.dtype == torch.float64 else eager(case)
    for name in Results._fields:
        assert_close(
            f"{case}: {name}",
            getattr(whole, name),
            getattr(exact, name),
            None if rounded is None else getattr(rounded, name),
        )


def check_cases(
    cases: Sequence[Case], backend: Backend = "threads", *, timeout: float = 100.0, **options: Any
) -> None:
    """Run cases of one P and hold each against the oracle."""
    for case, by_rank in zip(cases, run_cases(cases, backend, timeout=timeout, **options), strict=True):
        assert_equals_oracle(case, by_rank)


def assert_same_bits(by_rank: Sequence[Results], others: Sequence[Results]) -> None:
    """Two runs gave the same bits on every rank."""
    assert len(by_rank) == len(others)
    for rank, (mine, theirs) in enumerate(zip(by_rank, others, strict=True)):
        for name, x, y in zip(Results._fields, mine, theirs, strict=True):
            assert x.dtype == y.dtype and torch.equal(_bytes(x), _bytes(y)), (
                f"{name} of rank {rank} has other bits"
            )


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)
