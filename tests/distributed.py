"""The one harness of the distributed tests: run cases on every rank of a group, put the results together.

Padding rows of all inputs hold NaN, so that a row which is read although it is padding shows in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import meshattn as ma
from cases import Inputs, Results
from mesh_cases import Case, eager, inputs_of, oracle, score_options, sinks_of
from meshattn.attention import (
    mesh_attention,
    ring_attention,
)  # here, not in every forked rank: it takes seconds
from meshattn.layouts import Layout
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks
from tolerance import assert_close

Backend = Literal["threads", "gloo"]
PADDING = float("nan")


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
