"""Tokens go in and out of a mesh unchanged, for every layout, length, dim and type."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from distributed import Backend
from mesh_cases import LAYOUTS
from meshattn import sequence
from meshattn.layouts import LayoutKind
from meshattn.packing import as_bits
from meshattn.testing import run_ranks

RANKS = (1, 2, 3, 4)
TYPES = (
    torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
    torch.int16, torch.uint16, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


def _numbered(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    numbers = torch.arange(1, 1 + torch.Size(size).numel()).view(size)
    return numbers % 2 == 0 if dtype == torch.bool else (numbers % 200).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", RANKS, ids="P{}".format)
def test_shard_positions_and_labels_of_every_length(ranks: int, layout: LayoutKind) -> None:
    """Against the plainest statement: which token stands where, and which comes next."""

    def on_rank(group: Any) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        mesh = ma.init_attention_mesh(group)
        rows = []
        for seq_len in range(1, 4 * ranks + 4):
            seq = mesh.sequence(seq_len, layout=layout)
            ids = _numbered(2, seq_len)
            rows.append((seq.shard(ids), seq.position_ids(), seq.shift_labels(ids), seq.real_rows))
        assert mesh.traffic() == (), "no communication"
        return rows

    by_rank = run_ranks(ranks, on_rank)
    for number, seq_len in enumerate(range(1, 4 * ranks + 4)):
        ids = _numbered(2, seq_len)
        following = torch.full_like(ids, -100)
        following[:, :-1] = ids[:, 1:]
        seen = []
        for rank in range(ranks):
            shard, positions, labels, real = by_rank[rank][number]
            assert shard.shape == labels.shape == (2, -(-seq_len // ranks)) and positions.dtype == torch.int64
            mine = positions[:real]
            assert torch.equal(shard[:, :real], ids[:, mine]) and torch.equal(
                labels[:, :real], following[:, mine]
            )
            assert (
                not shard[:, real:].any() and not positions[real:].any() and (labels[:, real:] == -100).all()
            )
            seen += mine.tolist()
        assert sorted(seen) == list(range(seq_len)), "each token on one rank"


def test_striped_tokens_go_round() -> None:
    """Token t is on rank t mod P, row t div P: the default layout, in numbers."""

    def on_rank(group: Any) -> list[int]:
        positions: list[int] = ma.init_attention_mesh(group).sequence(7).position_ids().tolist()
        return positions

    assert run_ranks(3, on_rank) == [[0, 3, 6], [1, 4, 0], [2, 5, 0]]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_unshard_is_the_inverse_of_shard(layout: LayoutKind, backend: Backend) -> None:
    """Every dim, counted from both ends, and every type; the padding may hold anything."""

    def on_rank(group: Any) -> list[tuple[Tensor, Tensor]]:
        mesh = ma.init_attention_mesh(group, timeout=60)
        pairs = []
        for seq_len in (1, 4, 11):
            seq = mesh.sequence(seq_len, layout=layout)
            unread = _numbered(2, seq_len, dtype=torch.complex64) * 1j  # conjugated when it is read
            pairs.append((seq.unshard(seq.shard(unread).conj()), unread.conj()))
            for dim in (0, 1, 2, -1, -2, -3):
                size = [2, 3, 5]
                size[dim] = seq_len
                for dtype in TYPES if dim == 1 else (torch.float64,):
                    whole = _numbered(*size, dtype=dtype)
                    shard = seq.shard(whole, dim=dim)
                    shard.narrow(dim, seq.real_rows, seq.rows - seq.real_rows).fill_(1)
                    pairs.append((seq.unshard(shard, dim=dim), whole))
        return pairs

    for pairs in run_ranks(3, on_rank, backend):
        for found, whole in pairs:
            assert found.dtype == whole.dtype and torch.equal(as_bits(found), as_bits(whole.resolve_conj()))


def test_strided_tensors_and_vectors() -> None:
    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(11)
        vector, matrix = _numbered(11), _numbered(11, 4).t()
        assert torch.equal(seq.unshard(seq.shard(vector, dim=0), dim=0), vector)
        assert torch.equal(seq.unshard(seq.shard(matrix), dim=1), matrix)
        strided = seq.shard(_numbered(4, 11, 3), dim=1).transpose(1, 2)
        assert torch.equal(seq.unshard(strided, dim=2), _numbered(4, 11, 3).transpose(1, 2))

    run_ranks(4, on_rank)


def test_results_have_memory_of_their_own() -> None:
    """Writing to a shard or to an unsharded tensor changes nothing else, also on one rank."""

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(6)
        whole = _numbered(1, 6)
        shard = seq.shard(whole)
        kept = shard.clone()
        seq.unshard(shard).zero_()
        seq.shift_labels(whole).zero_()
        seq.position_ids().zero_()
        assert torch.equal(shard, kept) and seq.unshard(shard).tolist() == whole.tolist()
        shard.zero_()
        assert torch.equal(whole, _numbered(1, 6))

    for ranks in (1, 2):
        run_ranks(ranks, on_rank)


def test_labels_of_other_types_and_dims() -> None:
    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(5)
        ids = _numbered(5, 2, dtype=torch.int32)
        labels = seq.shift_labels(ids, dim=0)
        assert labels.dtype == torch.int64
        assert torch.equal(labels, seq.shift_labels(ids.t(), dim=-1).t())

    run_ranks(2, on_rank)


def test_loss_of_the_shards_is_the_loss_of_the_whole() -> None:
    """Labels and ignore_index together: the mean over all tokens, from sums of every rank."""
    ids = torch.randint(0, 9, (2, 14))
    logits = torch.randn(2, 14, 9, dtype=torch.float64)
    whole = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def on_rank(group: Any) -> tuple[Tensor, int]:
        seq = ma.init_attention_mesh(group).sequence(14, layout="zigzag")
        labels = seq.shift_labels(ids).flatten()
        loss = torch.nn.functional.cross_entropy(seq.shard(logits).flatten(0, 1), labels, reduction="sum")
        return loss, int((labels != -100).sum())

    parts = run_ranks(4, on_rank)
    assert sum(count for _, count in parts) == 2 * 13
    assert torch.isclose(sum(loss for loss, _ in parts) / 26, whole, rtol=1e-12)


def test_meta_and_grad_free_tensors() -> None:
    """A tensor that requires grad is taken under no_grad: there is no gradient to lose."""

    def on_rank(group: Any) -> None:
        seq = ma.init_attention_mesh(group).sequence(6)
        x = torch.ones(1, 6, requires_grad=True)
        with torch.no_grad():
            assert not seq.shard(x).requires_grad
        assert seq.shard(torch.empty(1, 6, device="meta")).shape == (1, 3)
        assert seq.position_ids("meta").device.type == "meta"
        assert "6 tokens, striped, 3 rows on each of 2 ranks" in repr(seq)

    run_ranks(2, on_rank)


def test_masks_are_kept_for_all_that_they_follow_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each rule and each kind of keys; those used last stay."""
    monkeypatch.setattr(sequence, "_KEPT_MASKS", 6)

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(9, cu_seqlens=[0, 3, 8])

        def made() -> list[object]:
            cuts, layouts = ([0, 3, 8], [0, 5, 8]), ("striped", "zigzag")
            keys = [mesh.sequence(8, layout=layout, cu_seqlens=cut) for cut in cuts for layout in layouts]
            rules = [{"causal": True}, {"window_size": (2, 0)}]
            return [*(seq.masks(x) for x in keys), *(seq.masks(keys[0], **rule) for rule in rules)]

        first, again = made(), made()
        assert len(set(map(id, first))) == 6 and all(x is y for x, y in zip(first, again, strict=True))
        kept = seq.masks(mesh.sequence(8, cu_seqlens=[0, 3, 8]))
        seq.masks(seq)  # one too many
        assert kept is first[0] and seq.masks(mesh.sequence(8, cu_seqlens=[0, 3, 8])) is kept, "used last"

    run_ranks(2, on_rank)


class _Layer(torch.nn.Module):
    def __init__(self, seq: ma.ShardedSequence) -> None:
        super().__init__()
        self.mesh, self.seq, self.weight = seq.mesh, seq, torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        out = ma.mesh_attention(x * self.weight, x, x, self.seq)
        assert isinstance(out, Tensor)
        return out


def test_copies_of_a_module_share_its_mesh_and_sequence() -> None:
    """Also after a call, of which a sequence keeps the plan; what is pickled says why it cannot be."""

    def on_rank(group: Any) -> str:
        layer = _Layer(ma.init_attention_mesh(group).sequence(5))
        x = torch.ones(1, layer.seq.rows, 2, 8)
        out = layer(x)
        twin = copy.deepcopy(layer)
        assert twin.mesh is layer.mesh and twin.seq is layer.seq and twin.weight is not layer.weight
        assert copy.copy(layer.seq) is layer.seq and copy.copy(layer.mesh) is layer.mesh
        assert torch.equal(twin(x), out)
        with pytest.raises(TypeError, match=r"cannot be pickled.* build them again"):
            pickle.dumps(layer.mesh)
        with pytest.raises(TypeError) as info:
            pickle.dumps(layer)
        return str(info.value)

    for text in run_ranks(2, on_rank):
        assert "an AttentionMesh is a connection of this process" in text
