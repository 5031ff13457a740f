"""Packed documents: what they are given as, positions and labels, agreement of the ranks, what is kept."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from mesh_cases import LAYOUTS, Packed
from meshattn import masks
from meshattn.agreement import Agreement, RankMismatchError
from meshattn.documents import Documents, PackedDocuments
from meshattn.layouts import LayoutKind
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks


def random_packing(rng: random.Random, seq_len: int) -> Packed:
    """One to six documents, empty ones among them, sometimes with a tail and sometimes with gaps."""
    edges = sorted(rng.choice([rng.randint(0, seq_len), seq_len]) for _ in range(rng.randint(1, 6)))
    bounds = (0, *edges)
    if rng.random() < 0.5:
        return Packed(bounds)
    return Packed(bounds, tuple(rng.randint(0, end - start) for start, end in pairwise(bounds)))


def spans(packed: Packed) -> list[tuple[int, int]]:
    starts = packed.bounds[:-1]
    lengths = packed.lengths or [end - start for start, end in pairwise(packed.bounds)]
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 3, 4], ids="P{}".format)
def test_positions_restart_and_labels_stop(ranks: int, layout: LayoutKind) -> None:
    """Against the plainest statement, document by document."""
    rng = random.Random(f"positions {ranks} {layout}")
    lengths = [*range(1, 12), 29]
    packings = [random_packing(rng, seq_len) for seq_len in lengths]

    def on_rank(group: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        mesh = ma.init_attention_mesh(group)
        answers = []
        for seq_len, packed in zip(lengths, packings, strict=True):
            seq = mesh.sequence(seq_len, layout=layout, **packed.arguments())
            ids = torch.arange(100, 100 + 2 * seq_len, dtype=torch.int32).view(2, seq_len)
            place = mesh.sequence(seq_len, layout=layout).position_ids()[: seq.real_rows]
            assert not seq.position_ids()[seq.real_rows :].any()
            assert (seq.shift_labels(ids)[:, seq.real_rows :] == -100).all()
            answers.append(
                (place, seq.position_ids()[: seq.real_rows], seq.shift_labels(ids)[:, : seq.real_rows])
            )
        assert mesh.traffic() == (), "no communication"
        return answers

    by_rank = run_ranks(ranks, on_rank)
    for number, (seq_len, packed) in enumerate(zip(lengths, packings, strict=True)):
        position = torch.zeros(seq_len, dtype=torch.int64)
        label = torch.full((2, seq_len), -100)
        ids = torch.arange(100, 100 + 2 * seq_len).view(2, seq_len)
        for start, end in spans(packed):
            position[start:end] = torch.arange(end - start)
            label[:, start : max(end - 1, start)] = ids[:, start + 1 : end]
        for answers in by_rank:
            place, positions, labels = answers[number]
            assert torch.equal(positions, position[place]), packed
            assert labels.dtype == torch.int64 and torch.equal(labels, label[:, place]), packed


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tensors_and_lists_are_the_same(dtype: torch.dtype) -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        bounds, lengths = [0, 3, 3, 9], [2, 0, 6]
        plain = mesh.sequence(11, cu_seqlens=bounds, document_lengths=lengths)
        tensors = mesh.sequence(
            11,
            cu_seqlens=torch.tensor(bounds, dtype=dtype),
            document_lengths=torch.tensor(lengths, dtype=dtype),
        )
        assert plain.documents == tensors.documents == PackedDocuments((0, 3, 3, 9), (2, 0, 6))
        assert "11 tokens in 3 documents" in repr(plain)

    run_ranks(2, on_rank)


def test_gaps_become_documents_of_one_side() -> None:
    paired = Documents.of(PackedDocuments((0, 4, 6), (3, 2)), PackedDocuments((0, 5, 9)))
    assert paired == Documents((0, 3, 4, 4, 6, 6, 6), (0, 5, 5, 5, 9, 9, 9))
    with pytest.raises(ValueError, match="seq has 2 documents and kv_seq 1"):
        Documents.of(PackedDocuments((0, 4, 6), (3, 2)), PackedDocuments((0, 5)))


# Finding the bounds


@pytest.mark.parametrize("seed", range(20))
def test_bounds_from_positions_and_from_end_tokens(seed: int) -> None:
    """Of random packs without empty documents, which nothing in the tokens shows."""
    rng = random.Random(seed)
    lengths = [rng.choice([1, 1, 2, 5, 9]) for _ in range(rng.randint(1, 8))]
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.randint(5, 9, (2, bounds[-1]))
    tokens[:, torch.tensor(bounds[1:]) - 1] = 4
    for ids in (positions, positions[None], positions.int().expand(3, -1)):
        found = ma.cu_seqlens_from_position_ids(ids)
        assert found.dtype == torch.int64 and found.tolist() == bounds
    assert ma.cu_seqlens_from_end_tokens(tokens, 4).tolist() == bounds
    assert ma.cu_seqlens_from_end_tokens(tokens[0], 4).tolist() == bounds
    with torch.device("meta"):  # the default device is not asked
        assert ma.cu_seqlens_from_position_ids(positions).tolist() == bounds
    unfinished = torch.cat([tokens, torch.full((2, 3), 7)], dim=1)
    assert ma.cu_seqlens_from_end_tokens(unfinished, 4).tolist() == [*bounds, bounds[-1] + 3]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (torch.tensor([0, 1, 3]), "goes from 1 to 3 at token 2"),
        (torch.tensor([4, 5, 6]), "goes from -1 to 4 at token 0"),
        (torch.tensor([[0, 1, 2], [0, 1, 0]]), "cut into different documents"),
        (torch.tensor([0.0, 1.0]), "must hold integers"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), r"must be \[S\] or \[B, S\]"),
        (torch.zeros(0, dtype=torch.int64), r"must be \[S\] or \[B, S\]"),
        ([0, 1], "is a list"),
    ],
    ids=["jump", "late-start", "rows-differ", "floats", "3-D", "nothing", "list"],
)
def test_positions_that_are_no_documents(positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"position_ids.*{message}"):
        ma.cu_seqlens_from_position_ids(positions)


@pytest.mark.parametrize("end_token", [None, 4.0, "4", [4], torch.tensor([1, 4])], ids=str)
def test_an_end_token_is_one_integer(end_token: Any) -> None:
    """A tensor of several would be compared with the tokens one by one."""
    with pytest.raises(ValueError, match=r"end_token is .*; it must be one integer token"):
        ma.cu_seqlens_from_end_tokens(torch.tensor([1, 4, 1]), end_token)
    assert ma.cu_seqlens_from_end_tokens(torch.tensor([1, 4, 1]), torch.tensor(4)).tolist() == [0, 2, 3]  # type: ignore[arg-type]


def test_end_tokens_of_rows_that_differ() -> None:
    with pytest.raises(ValueError, match="rows of input_ids are cut into different documents"):
        ma.cu_seqlens_from_end_tokens(torch.tensor([[1, 4, 1], [4, 1, 1]]), 4)


# Agreement


def _attend(mesh: AttentionMesh, seq: ma.ShardedSequence, **options: Any) -> Tensor:
    x = torch.ones(1, seq.rows, 1, 8, dtype=torch.float64, requires_grad=True)
    out = ma.mesh_attention(x, x, x, seq, **options)
    assert isinstance(out, Tensor)
    out.nan_to_num().sum().backward()
    return out


OTHER_DOCUMENTS = {
    "bounds": "cu_seqlens[1] is 4 on rank 1, but 5 on ranks 0, 2",
    "lengths": "document_lengths[1] is 2 on rank 1, but 3 on ranks 0, 2",
    "keys": "cu_seqlens[1] is 1 on rank 1, but 3 on ranks 0, 2",
    "count": "length of cu_seqlens is 4 on rank 1, but 3 on ranks 0, 2",
    "none": "in 2 documents",
}


@pytest.mark.parametrize("what", OTHER_DOCUMENTS)
def test_ranks_must_state_the_same_documents(what: str) -> None:
    """One rank has others, in the second step; all ranks say which, and no rank moves anything."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=2.0)
        odd = mesh.rank == 1
        _attend(mesh, mesh.sequence(9, cu_seqlens=[0, 2, 9]))
        mesh.reset_traffic()
        bounds = [0, 4, 9] if odd and what == "bounds" else [0, 5, 9]
        lengths = [4, 2] if odd and what == "lengths" else [4, 3]
        keys = [0, 1, 9] if odd and what == "keys" else [0, 3, 9]
        if odd and what == "count":  # one more, which is empty
            bounds, lengths, keys = [*bounds, 9], [*lengths, 0], [*keys, 9]
        packed = {} if odd and what == "none" else {"cu_seqlens": bounds, "document_lengths": lengths}
        kv = {} if odd and what == "none" else {"cu_seqlens": keys}
        with pytest.raises(ma.RankMismatchError) as info:
            _attend(mesh, mesh.sequence(9, **packed), kv_seq=mesh.sequence(9, **kv))
        assert sum(record.sent_bytes for record in mesh.traffic()) == 0
        return str(info.value)

    for text in run_ranks(3, on_rank):
        assert OTHER_DOCUMENTS[what] in text and "digest" not in text


def test_an_error_of_one_rank_beside_new_documents_is_everybodys() -> None:
    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=5.0)
        with pytest.raises(ValueError) as info:
            _attend(
                mesh, mesh.sequence(9, cu_seqlens=[0, 5, 9]), softmax_scale=-1.0 if mesh.rank == 2 else 1.0
            )
        seq = mesh.sequence(9, cu_seqlens=[0, 5, 9])
        _attend(mesh, seq)  # the mesh works on
        return str(info.value)

    for rank, text in enumerate(run_ranks(3, on_rank)):
        assert "softmax_scale is -1.0" in text and (rank == 2 or text.startswith("rank 2:"))


@pytest.mark.parametrize("number", [1, 5], ids=lambda number: f"call{number}")
def test_sequences_taken_in_another_order_are_named_on_all_ranks(number: int) -> None:
    """Equally long ones with other documents, agreed on before: their masks must not be mixed."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=2.0)
        pair = [mesh.sequence(9, cu_seqlens=[0, cut, 9]) for cut in (4, 7)]
        for seq in pair * number:
            _attend(mesh, seq)
        if mesh.rank == 1:
            pair.reverse()
        with pytest.raises(RankMismatchError) as info:
            for seq in pair:
                _attend(mesh, seq)
        return str(info.value)

    for text in run_ranks(3, on_rank):
        assert "documents agreed on" in text and "rank 1" in text


def test_new_documents_cost_one_comparison_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern of calls stays foreseen, however many layers see the new documents."""
    checks: list[int] = []
    check = Agreement._check

    def counting(self: Agreement, *given: Any) -> None:
        if self._rank == 0:
            checks.append(1)
        check(self, *given)

    monkeypatch.setattr(Agreement, "_check", counting)

    def on_rank(group: Any) -> list[int]:
        mesh = ma.init_attention_mesh(group)
        counts = []
        for step in range(6):
            before = len(checks)
            seq = mesh.sequence(9, cu_seqlens=[0, step + 1, 9])
            x = torch.ones(1, seq.rows, 1, 8, requires_grad=True)
            out = x
            for _ in range(4):
                layer = ma.mesh_attention(out, x, x, seq, causal=True)
                assert isinstance(layer, Tensor)
                out = layer
            out.nan_to_num().sum().backward()
            counts.append(len(checks) - before)
        return counts

    counts = run_ranks(2, on_rank)[0]
    assert counts[3:] == [1, 1, 1]


# What is kept


def test_intervals_are_made_once_a_block_and_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers, forward and backward; then the same for other rules, of which a few are kept."""
    made: list[tuple[masks.MaskRule, int, int]] = []
    block_intervals = masks.block_intervals

    def counting(rule: masks.MaskRule, q_layout: Any, i: int, kv_layout: Any, j: int) -> Any:
        made.append((rule, i, j))
        return block_intervals(rule, q_layout, i, kv_layout, j)

    monkeypatch.setattr(masks, "block_intervals", counting)

    def on_rank(group: Any) -> int:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(24, layout="zigzag", cu_seqlens=[0, 7, 24])
        for _ in range(3):
            _attend(mesh, seq, causal=True)
            _attend(mesh, seq, window_size=(3, 3))
        return len(seq._masks)

    assert run_ranks(3, on_rank) == [2, 2, 2]
    assert len(made) == 2 * 9 == len(set(made))

    def many_rules(group: Any) -> int:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(24, cu_seqlens=[0, 7, 24])
        for left in range(12):
            _attend(mesh, seq, window_size=(left, 0))
        return len(seq._masks)

    assert run_ranks(1, many_rules) == [8]
