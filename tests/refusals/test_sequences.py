"""Sequences, documents and what goes in and out of them, where something is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshattn as ma
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks
from refused_calls import RANKS, ROWS, SEQ_LEN, Calls, attend, check_refused, check_refused_on_all, ones


def _another(mesh: AttentionMesh) -> AttentionMesh:
    return AttentionMesh(mesh.connection, mesh.agreement, mesh.tile)


def _packed(mesh: AttentionMesh, queries: list[int] | None, keys: list[int] | None) -> Any:
    x = torch.ones(2, ROWS, 4, 8)
    seq, kv_seq = (mesh.sequence(SEQ_LEN, cu_seqlens=bounds) for bounds in (queries, keys))
    return ma.mesh_attention(x, x, x, seq, kv_seq=kv_seq)


CALLS: Calls = {
    "kv-seq": (
        lambda m: attend(m, kv_seq=4),
        ("kv_seq is a int", "mesh.sequence(seq_len)"),
    ),
    "kv-seq-a-list": (
        lambda m: attend(m, kv_seq=[4]),
        ("kv_seq is a list", "mesh.sequence(seq_len)"),
    ),
    "k-not-of-kv-seq": (
        lambda m: attend(m, kv_seq=m.sequence(4)),
        ("k is [2, 5, 4, 8]", "the 2 rows of a shard", "4 tokens"),
    ),
    "kv-seq-of-another-mesh": (
        lambda m: attend(m, kv_seq=_another(m).sequence(SEQ_LEN)),
        ("kv_seq belongs to another mesh", "the same mesh"),
    ),
    "documents-of-queries-alone": (
        lambda m: _packed(m, [0, 3, 8], None),
        ("only seq has documents", "give both sequences cu_seqlens"),
    ),
    "documents-of-keys-alone": (
        lambda m: _packed(m, None, [0, 8]),
        ("only kv_seq has documents",),
    ),
    "documents-of-other-number": (
        lambda m: _packed(m, [0, 3, 8], [0, 8]),
        ("seq has 2 documents and kv_seq 1", "equally many"),
    ),
    "documents-too-long": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 9]),
        ("cu_seqlens ends at 9", "sequence length 8"),
    ),
    "documents-not-cumulated": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 3, 2])),
        ("cu_seqlens decreases from 3 to 2", "cumulated lengths"),
    ),
    "documents-of-floats": (
        lambda m: m.sequence(8, cu_seqlens=[0, 2.5]),
        ("cu_seqlens is a list", "integers"),
    ),
    "documents-of-complex-numbers": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 8], dtype=torch.complex64)),
        ("cu_seqlens is a torch.complex64 tensor of shape [2]", "1-D tensor of integers"),
    ),
    "documents-without-data": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 8], device="meta")),
        ("cu_seqlens is a torch.strided tensor on meta", "a device that holds data"),
    ),
    "lengths-without-documents": (
        lambda m: m.sequence(8, document_lengths=[3]),
        ("document_lengths is given without cu_seqlens",),
    ),
    "lengths-of-other-number": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 8], document_lengths=[3]),
        ("document_lengths has 1 entries and cu_seqlens 2 documents",),
    ),
    "length-beyond-its-slot": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 8], document_lengths=[3, 6]),
        ("document_lengths[1] is 6", "0 to 5"),
    ),
    "no-tokens": (lambda m: m.sequence(0), ("seq_len is 0", "at least one token")),
    "half-a-token": (lambda m: m.sequence(2.5), ("seq_len is 2.5", "whole number")),
    "more-rows-than-kernels-count": (
        lambda m: m.sequence(RANKS * 2**30 + 1),
        ("seq_len is 3221225473", "1073741825 rows in each of 3 chunks", "use more ranks"),
    ),
    "layout": (
        lambda m: m.sequence(8, layout="spiral"),
        ("'spiral'", "striped, zigzag, contiguous"),
    ),
    "shard-other-length": (
        lambda m: m.sequence(SEQ_LEN).shard(ones(1, 12)),
        ("tensor is [1, 12]", "dim 1 must have 13 rows", "13 tokens"),
    ),
    "shard-no-such-dim": (
        lambda m: m.sequence(SEQ_LEN).shard(ones(SEQ_LEN)),
        ("tensor has 1 dims", "no dim 1"),
    ),
    "shard-half-a-dim": (
        lambda m: m.sequence(SEQ_LEN).shard(ones(1, SEQ_LEN), dim=1.0),  # type: ignore[arg-type]
        ("dim is 1.0", "number of the dim of tensor"),
    ),
    "unshard-no-dim": (
        lambda m: m.sequence(SEQ_LEN).unshard(ones(1, ROWS), dim=None),  # type: ignore[arg-type]
        ("dim is None", "number of the dim of tensor"),
    ),
    "shard-sparse": (
        lambda m: m.sequence(SEQ_LEN).shard(ones(1, SEQ_LEN).to_sparse()),
        ("tensor is torch.sparse_coo", "dense"),
    ),
    "unshard-sparse": (
        lambda m: m.sequence(SEQ_LEN).unshard(ones(1, ROWS).to_sparse()),
        ("tensor is torch.sparse_coo", "dense"),
    ),
    "shard-with-grad": (
        lambda m: m.sequence(SEQ_LEN).shard(ones(1, SEQ_LEN).requires_grad_()),
        ("requires grad", "pass tensor.detach()"),
    ),
    "unshard-with-grad": (
        lambda m: m.sequence(SEQ_LEN).unshard(ones(1, ROWS).requires_grad_()),
        ("requires grad", "pass tensor.detach()"),
    ),
    "unshard-whole": (
        lambda m: m.sequence(SEQ_LEN).unshard(ones(1, SEQ_LEN)),
        ("tensor is [1, 13]", "dim 1 must have 5 rows", "not 13"),
    ),
    "labels-of-floats": (
        lambda m: m.sequence(SEQ_LEN).shift_labels(ones(1, SEQ_LEN)),
        ("input_ids is torch.float32", "integer tokens"),
    ),
    "labels-of-a-shard": (
        lambda m: m.sequence(SEQ_LEN).shift_labels(ones(1, ROWS).long()),
        ("input_ids is [1, 5]", "dim 1 must have 13 rows"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_sequences(name: str) -> None:
    check_refused(CALLS, name)


def test_wrong_keys_of_one_rank_are_everybodys_error() -> None:
    check_refused_on_all(CALLS, "kv-seq-a-list")


def test_keys_of_another_mesh_on_one_rank_are_everybodys() -> None:
    """The error goes to the ranks of the mesh of the queries, which wait for it there."""

    def on_rank(group: Any) -> str:
        mesh, other = (ma.init_attention_mesh(group, timeout=1.0) for _ in range(2))
        seq, mine, theirs = (m.sequence(SEQ_LEN, cu_seqlens=[0, 5, 13]) for m in (mesh, mesh, other))
        x = torch.ones(2, ROWS, 4, 8)
        ma.mesh_attention(x, x, x, seq, kv_seq=mine)  # now the ranks have compared these documents
        with pytest.raises(ValueError) as info:
            ma.mesh_attention(x, x, x, seq, kv_seq=theirs if mesh.rank == 1 else mine)
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank)):
        assert "kv_seq belongs to another mesh" in text and (rank == 1 or text.startswith("rank 1:"))
