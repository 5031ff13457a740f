"""User errors name the tensor, its size, the rule and the way out, on all ranks, before any transfer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import meshattn as ma
from distributed import Backend
from meshattn.arguments import _INSTEAD
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks
from meshattn.transport.threads import SimulatedGroup

RANKS, SEQ_LEN, ROWS = 3, 13, 5
Words = tuple[str, ...]


def _attend(mesh: AttentionMesh, q: Any = None, k: Any = None, v: Any = None, **options: Any) -> Any:
    plain = torch.ones(2, ROWS, 4, 8)
    q, k, v = (plain if x is None else x for x in (q, k, v))
    return ma.mesh_attention(q, k, v, mesh.sequence(SEQ_LEN), **options)


def _another(mesh: AttentionMesh) -> AttentionMesh:
    return AttentionMesh(mesh.connection, mesh.agreement, mesh.tile)


def _packed(mesh: AttentionMesh, queries: list[int] | None, keys: list[int] | None) -> Any:
    x = torch.ones(2, ROWS, 4, 8)
    seq, kv_seq = (mesh.sequence(SEQ_LEN, cu_seqlens=bounds) for bounds in (queries, keys))
    return ma.mesh_attention(x, x, x, seq, kv_seq=kv_seq)


def _ones(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(size, dtype=dtype)


class _OfSeveralRanks(Tensor):
    """Looks like a DTensor."""

    def to_local(self) -> Tensor:
        return self.as_subclass(Tensor)


class _Wrapper(Tensor):
    """Describes another tensor, as a FakeTensor and quantized weights do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> _Wrapper:
        made: _Wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nothing is to be computed with it")


def _nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(ROWS, 4, 8)] * 2)


def _of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, ROWS, 4, 8)


CALLS: dict[str, tuple[Callable[[AttentionMesh], Any], type[Exception], Words]] = {
    "q-of-3-dims": (
        lambda m: _attend(m, q=_ones(2, ROWS, 8)),
        ValueError,
        ("q is [2, 5, 8]", "4 dims", "[batch, rows, heads, head size]"),
    ),
    "whole-sequence": (
        lambda m: _attend(m, *[_ones(2, SEQ_LEN, 4, 8)] * 3),
        ValueError,
        (
            "q is [2, 13, 4, 8]",
            "the 5 rows of a shard",
            "13 tokens, striped",
            "whole sequence",
            "seq.shard(tensor, dim=1)",
        ),
    ),
    "heads-before-rows": (
        lambda m: _attend(m, *[_ones(2, 4, ROWS, 8)] * 3),
        ValueError,
        ("q is [2, 4, 5, 8]", "the 5 rows", "transpose dims 1 and 2"),
    ),
    "k-of-other-rows": (
        lambda m: _attend(m, k=_ones(2, 6, 4, 8)),
        ValueError,
        ("k is [2, 6, 4, 8]", "dim 1 must have the 5 rows"),
    ),
    "v-of-other-rows": (
        lambda m: _attend(m, v=_ones(2, 6, 4, 8)),
        ValueError,
        ("v is [2, 6, 4, 8]", "dim 1 must have the 5 rows"),
    ),
    "integers": (
        lambda m: _attend(m, q=_ones(2, ROWS, 4, 8, dtype=torch.int32)),
        ValueError,
        ("q is torch.int32", "float64, float32, bfloat16 or float16"),
    ),
    "other-dtype": (
        lambda m: _attend(m, k=_ones(2, ROWS, 4, 8, dtype=torch.bfloat16)),
        ValueError,
        ("k is torch.bfloat16 on cpu but q is torch.float32 on cpu", "must agree"),
    ),
    "other-device": (
        lambda m: _attend(m, v=torch.ones(2, ROWS, 4, 8, device="meta")),
        ValueError,
        ("v is torch.float32 on meta but q is torch.float32 on cpu", "must agree"),
    ),
    "without-memory": (
        lambda m: _attend(m, *[torch.ones(2, ROWS, 4, 8, device="meta")] * 3),
        ValueError,
        ("q is a Tensor on meta without memory of its own", "pass a plain tensor"),
    ),
    "under-a-transform": (
        lambda m: torch.func.vmap(lambda q: _attend(m, q))(_ones(3, 2, ROWS, 4, 8)),
        ValueError,
        ("q is a Tensor on cpu without memory of its own", "outside of torch.func's transforms"),
    ),
    "a-wrapper": (
        lambda m: _attend(m, v=_Wrapper(_ones(2, ROWS, 4, 8))),
        ValueError,
        ("v is a _Wrapper on cpu without memory of its own",),
    ),
    "odd-head-size": (
        lambda m: _attend(m, *[_ones(2, ROWS, 4, 12)] * 3),
        ValueError,
        ("q is [2, 5, 4, 12]", "head size 12", "multiple of 8", "pad it with zeros and pass softmax_scale"),
    ),
    "odd-head-size-of-v": (
        lambda m: _attend(m, v=_ones(2, ROWS, 4, 20)),
        ValueError,
        ("v is [2, 5, 4, 20]", "multiple of 8"),
    ),
    "batch": (
        lambda m: _attend(m, k=_ones(1, ROWS, 4, 8)),
        ValueError,
        ("batch sizes differ", "q 2, k 1, v 2"),
    ),
    "head-size-of-k": (
        lambda m: _attend(m, k=_ones(2, ROWS, 4, 16)),
        ValueError,
        ("q has head size 8 but k 16", "must agree"),
    ),
    "heads-of-v": (lambda m: _attend(m, v=_ones(2, ROWS, 2, 8)), ValueError, ("k has 4 heads but v 2",)),
    "heads-not-a-multiple": (
        lambda m: _attend(m, None, *[_ones(2, ROWS, 3, 8)] * 2),
        ValueError,
        ("q has 4 heads and k 3", "must be a multiple of"),
    ),
    "no-kv-heads": (
        lambda m: _attend(m, None, *[_ones(2, ROWS, 0, 8)] * 2),
        ValueError,
        ("q has 4 heads and k 0",),
    ),
    "scale-0": (
        lambda m: _attend(m, softmax_scale=0.0),
        ValueError,
        ("softmax_scale is 0.0", "positive and finite", "None for D ** -0.5"),
    ),
    "scale-nan": (
        lambda m: _attend(m, softmax_scale=float("nan")),
        ValueError,
        ("softmax_scale is nan", "positive and finite"),
    ),
    "reduce-dtype": (
        lambda m: _attend(m, reduce_dtype=torch.bfloat16),
        ValueError,
        ("reduce_dtype=torch.bfloat16", "torch.float32 (the default)"),
    ),
    "scale-beyond-floats": (
        lambda m: _attend(m, softmax_scale=10**400),
        ValueError,
        ("softmax_scale is 1000", "positive and finite"),
    ),
    "scale-beyond-accumulators": (
        lambda m: _attend(m, softmax_scale=1e39),
        ValueError,
        ("softmax_scale is 1e+39", "torch.float32, so give at most 3.4e+38"),
    ),
    **{
        f"softcap-{cap}": (
            lambda m, cap=cap: _attend(m, softcap=cap),
            ValueError,
            (f"softcap is {cap}", "from 1e-30 to 1e+30, or 0.0"),
        )
        for cap in (5e-324, 1e-46, 1e-39, 3e38, 1e39)
    },
    "softcap-below-scale": (
        lambda m: _attend(m, softcap=1e-20, softmax_scale=1e30),
        ValueError,
        ("softmax_scale / softcap is", "torch.float32, so give at most 3.4e+38"),
    ),
    "causal": (lambda m: _attend(m, causal=1), ValueError, ("causal is 1", "True or False")),
    "deterministic": (
        lambda m: _attend(m, deterministic=None, kernel="sdpa"),
        ValueError,
        ("deterministic is None", "True or False"),
    ),
    "return-lse": (lambda m: _attend(m, return_lse="yes"), ValueError, ("return_lse is 'yes'",)),
    "nested": (
        lambda m: _attend(m, k=_nested()),
        ValueError,
        ("k is a nested tensor", "dense"),
    ),
    "of-several-ranks": (
        lambda m: _attend(m, v=_OfSeveralRanks(_ones(2, ROWS, 4, 8))),
        ValueError,
        ("v is a _OfSeveralRanks", "a plain tensor of this rank", "v.to_local()"),
    ),
    "made-in-inference-mode": (
        lambda m: _attend(m, _of_inference(), _ones(2, ROWS, 4, 8).requires_grad_()),
        ValueError,
        ("q was made in torch.inference_mode() and k requires grad", "pass q.clone()"),
    ),
    "sinks-made-in-inference-mode": (
        lambda m: _attend(m, v=_ones(2, ROWS, 4, 8).requires_grad_(), sinks=_of_inference()[0, 0, :, 0]),
        ValueError,
        ("sinks was made in torch.inference_mode() and v requires grad", "pass sinks.clone()"),
    ),
    "kernel": (lambda m: _attend(m, kernel="fast"), ValueError, ("kernel is 'fast'", "reference")),
    "kernel-of-a-gpu": (
        lambda m: _attend(m, kernel="hopper"),
        ValueError,
        ("q is on cpu", "kernel 'hopper' runs on compute capability 9.0", "Choose kernel='reference'"),
    ),
    "kernel-without-order": (
        lambda m: _attend(m, kernel="sdpa"),
        ValueError,
        ("kernel='sdpa' is not bitwise deterministic", "pass deterministic=False"),
    ),
    "kernel-of-equal-head-sizes": (
        lambda m: _attend(m, v=_ones(2, ROWS, 4, 16), kernel="sdpa", deterministic=False),
        ValueError,
        ("q and k have head size 8 and v 16", "kernel 'sdpa' takes equal ones"),
    ),
    "kernel-of-plain-masks": (
        lambda m: ma.mesh_attention(
            *[_ones(2, ROWS, 4, 8)] * 3,
            m.sequence(SEQ_LEN, layout="zigzag"),
            kernel="sdpa",
            deterministic=False,
        ),
        ValueError,
        ("intervals of their own", "kernel 'sdpa'", "striped and contiguous layouts"),
    ),
    "kernel-for": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, kernel="fast"),
        ValueError,
        ("kernel is 'fast'", "reference"),
    ),
    "kernel-for-integers": (
        lambda m: ma.kernel_for("cpu", torch.int32, 8),
        ValueError,
        ("dtype is torch.int32", "float64, float32, bfloat16 or float16"),
    ),
    "kernel-for-odd-head-size": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, 12),
        ValueError,
        ("head_dim_v is 12", "multiple of 8"),
    ),
    "kernel-for-a-great-softcap": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, softcap=1e300),
        ValueError,
        ("softcap is 1e+300", "from 1e-30 to 1e+30"),
    ),
    "kernel-for-no-probability": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, dropout_p=1.5),
        ValueError,
        ("dropout_p is 1.5", "below 1.0"),
    ),
    "kernel-for-a-list": (
        lambda m: ma.kernel_for("cpu", torch.float32, 8, kernel=["sdpa"]),  # type: ignore[arg-type]
        ValueError,
        ("kernel is a list", "give its name"),
    ),
    "window": (
        lambda m: _attend(m, window_size=(4, -2)),
        ValueError,
        ("window_size is (4, -2)", "(left, right)", "-1 for no bound"),
    ),
    "window-of-one": (lambda m: _attend(m, window_size=4), ValueError, ("window_size is 4", "(left, right)")),
    "softcap": (lambda m: _attend(m, softcap=-30.0), ValueError, ("softcap is -30.0", "positive or 0.0")),
    "softcap-of-a-kernel-without": (
        lambda m: _attend(m, softcap=30.0, kernel="sdpa"),
        ValueError,
        ("softcap is not 0; kernel 'sdpa' has none", "Choose kernel='reference'"),
    ),
    **{
        f"dropout-{p!r}": (
            lambda m, p=p: _attend(m, dropout_p=p),
            ValueError,
            (f"dropout_p is {p!r}", "from 0.0 for none and below 1.0"),
        )
        for p in (-0.1, 1.0, float("nan"), True, "0.1")
    },
    **{
        f"dropout-seed-{seed!r}": (
            lambda m, seed=seed: _attend(m, dropout_p=0.1, dropout_seed=seed),
            ValueError,
            (f"dropout_seed is {seed!r}", "from 0 to 2**64 - 1"),
        )
        for seed in (-1, 2**64, 0.5, True)
    },
    "dropout-of-a-kernel-without": (
        lambda m: _attend(m, dropout_p=0.1, dropout_seed=0, kernel="sdpa", deterministic=False),
        ValueError,
        ("dropout_p is not 0; kernel 'sdpa' has no dropout", "Choose kernel='reference'"),
    ),
    "kv-seq": (
        lambda m: _attend(m, kv_seq=4),
        ValueError,
        ("kv_seq is a int", "mesh.sequence(seq_len)"),
    ),
    "kv-seq-a-list": (
        lambda m: _attend(m, kv_seq=[4]),
        ValueError,
        ("kv_seq is a list", "mesh.sequence(seq_len)"),
    ),
    "sinks-of-other-heads": (
        lambda m: _attend(m, sinks=torch.zeros(3)),
        ValueError,
        ("sinks is [3] torch.float32", "[4], a logit for each query head"),
    ),
    "sinks-a-number": (
        lambda m: _attend(m, sinks=0.5),
        ValueError,
        ("sinks is a float", "a tensor, or None"),
    ),
    "sinks-sparse": (
        lambda m: _attend(m, sinks=torch.zeros(4).to_sparse()),
        ValueError,
        ("sinks is torch.sparse_coo", "dense"),
    ),
    "sinks-elsewhere": (
        lambda m: _attend(m, sinks=torch.zeros(4, device="meta")),
        ValueError,
        ("sinks is on meta but q on cpu",),
    ),
    "k-not-of-kv-seq": (
        lambda m: _attend(m, kv_seq=m.sequence(4)),
        ValueError,
        ("k is [2, 5, 4, 8]", "the 2 rows of a shard", "4 tokens"),
    ),
    "kv-seq-of-another-mesh": (
        lambda m: _attend(m, kv_seq=_another(m).sequence(SEQ_LEN)),
        ValueError,
        ("kv_seq belongs to another mesh", "the same mesh"),
    ),
    "documents-of-queries-alone": (
        lambda m: _packed(m, [0, 3, 8], None),
        ValueError,
        ("only seq has documents", "give both sequences cu_seqlens"),
    ),
    "documents-of-keys-alone": (
        lambda m: _packed(m, None, [0, 8]),
        ValueError,
        ("only kv_seq has documents",),
    ),
    "documents-of-other-number": (
        lambda m: _packed(m, [0, 3, 8], [0, 8]),
        ValueError,
        ("cu_seqlens_q has 2 documents and cu_seqlens_k 1", "equally many"),
    ),
    "documents-too-long": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 9]),
        ValueError,
        ("cu_seqlens ends at 9", "sequence length 8"),
    ),
    "documents-not-cumulated": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 3, 2])),
        ValueError,
        ("cu_seqlens decreases from 3 to 2", "cumulated lengths"),
    ),
    "documents-of-floats": (
        lambda m: m.sequence(8, cu_seqlens=[0, 2.5]),
        ValueError,
        ("cu_seqlens is a list", "integers"),
    ),
    "documents-of-complex-numbers": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 8], dtype=torch.complex64)),
        ValueError,
        ("cu_seqlens is a torch.complex64 tensor of shape [2]", "1-D tensor of integers"),
    ),
    "documents-without-data": (
        lambda m: m.sequence(8, cu_seqlens=torch.tensor([0, 8], device="meta")),
        ValueError,
        ("cu_seqlens is a torch.strided tensor on meta", "a device that holds data"),
    ),
    "lengths-without-documents": (
        lambda m: m.sequence(8, document_lengths=[3]),
        ValueError,
        ("document_lengths is given without cu_seqlens",),
    ),
    "lengths-of-other-number": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 8], document_lengths=[3]),
        ValueError,
        ("document_lengths has 1 entries and cu_seqlens 2 documents",),
    ),
    "length-beyond-its-slot": (
        lambda m: m.sequence(8, cu_seqlens=[0, 3, 8], document_lengths=[3, 6]),
        ValueError,
        ("document_lengths[1] is 6", "0 to 5"),
    ),
    "no-tokens": (lambda m: m.sequence(0), ValueError, ("seq_len is 0", "at least one token")),
    "half-a-token": (lambda m: m.sequence(2.5), ValueError, ("seq_len is 2.5", "whole number")),
    "more-rows-than-kernels-count": (
        lambda m: m.sequence(RANKS * 2**30 + 1),
        ValueError,
        ("seq_len is 3221225473", "1073741825 rows in each of 3 chunks", "use more ranks"),
    ),
    "layout": (
        lambda m: m.sequence(8, layout="spiral"),
        ValueError,
        ("'spiral'", "striped, zigzag, contiguous"),
    ),
    "shard-other-length": (
        lambda m: m.sequence(SEQ_LEN).shard(_ones(1, 12)),
        ValueError,
        ("tensor is [1, 12]", "dim 1 must have 13 rows", "13 tokens"),
    ),
    "shard-no-such-dim": (
        lambda m: m.sequence(SEQ_LEN).shard(_ones(SEQ_LEN)),
        ValueError,
        ("tensor has 1 dims", "no dim 1"),
    ),
    "shard-half-a-dim": (
        lambda m: m.sequence(SEQ_LEN).shard(_ones(1, SEQ_LEN), dim=1.0),  # type: ignore[arg-type]
        ValueError,
        ("dim is 1.0", "number of the dim of tensor"),
    ),
    "unshard-no-dim": (
        lambda m: m.sequence(SEQ_LEN).unshard(_ones(1, ROWS), dim=None),  # type: ignore[arg-type]
        ValueError,
        ("dim is None", "number of the dim of tensor"),
    ),
    "shard-with-grad": (
        lambda m: m.sequence(SEQ_LEN).shard(_ones(1, SEQ_LEN).requires_grad_()),
        ValueError,
        ("requires grad", "pass tensor.detach()"),
    ),
    "unshard-with-grad": (
        lambda m: m.sequence(SEQ_LEN).unshard(_ones(1, ROWS).requires_grad_()),
        ValueError,
        ("requires grad", "pass tensor.detach()"),
    ),
    "unshard-whole": (
        lambda m: m.sequence(SEQ_LEN).unshard(_ones(1, SEQ_LEN)),
        ValueError,
        ("tensor is [1, 13]", "dim 1 must have 5 rows", "not 13"),
    ),
    "labels-of-floats": (
        lambda m: m.sequence(SEQ_LEN).shift_labels(_ones(1, SEQ_LEN)),
        ValueError,
        ("input_ids is torch.float32", "integer tokens"),
    ),
    "labels-of-a-shard": (
        lambda m: m.sequence(SEQ_LEN).shift_labels(_ones(1, ROWS).long()),
        ValueError,
        ("input_ids is [1, 5]", "dim 1 must have 13 rows"),
    ),
    "coordinates-of-auto": (lambda m: m.coordinates(), ValueError, ("'auto'", "pass a tile")),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_wrong_calls(name: str) -> None:
    call, kind, fragments = CALLS[name]

    def on_rank(group: Any) -> tuple[str, int]:
        mesh = ma.init_attention_mesh(group, timeout=20)
        with pytest.raises(kind) as info:
            call(mesh)
        before = len(mesh.traffic())
        _attend(mesh)  # the mesh works on
        return str(info.value), before

    answers = run_ranks(RANKS, on_rank)
    assert len({text for text, _ in answers}) == 1, "all ranks say the same"
    text, transfers = answers[0]
    assert transfers == 0, "refused before any transfer"
    for fragment in fragments:
        assert fragment in text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "name", ["kv-seq-a-list", "nested", "sinks-sparse", "q-of-3-dims", "made-in-inference-mode"]
)
def test_a_wrong_call_of_one_rank_is_everybodys_error(name: str) -> None:
    """Nothing that one rank is given may stop it on the way to the others."""
    call, kind, fragments = CALLS[name]

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=5)
        with pytest.raises(kind) as info:
            (call if mesh.rank == 1 else _attend)(mesh)
        _attend(mesh)
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank)):
        assert rank == 1 or text.startswith("rank 1: ")
        for fragment in fragments:
            assert fragment in text


MESHES: dict[str, tuple[Callable[[SimulatedGroup], Any], type[Exception], Words]] = {
    "tile-of-other-ranks": (
        lambda g: ma.init_attention_mesh(g, tile=(2, 2)),
        ValueError,
        ("tile 2x2 needs 4 ranks but the mesh has 3", "1x3, 3x1"),
    ),
    "tile-text": (lambda g: ma.init_attention_mesh(g, tile="two"), ValueError, ("'two'", "for example 2x4")),
    "tile-of-three": (
        lambda g: ma.init_attention_mesh(g, tile=(1, 3, 1)),
        ValueError,
        ("(1, 3, 1)", "(a, b)"),
    ),
    "tile-of-zero": (lambda g: ma.init_attention_mesh(g, tile=(0, 3)), ValueError, ("0x3", "at least 1")),
    "heads": (
        lambda g: ma.init_attention_mesh(g, heads=2),
        ValueError,
        ("heads=2 must divide the 3 ranks", "use one of 1, 3"),
    ),
    "heads-text": (lambda g: ma.init_attention_mesh(g, heads="many"), ValueError, ("heads='many'", "1, 3")),
    "heads-auto": (
        lambda g: ma.init_attention_mesh(g, heads="auto"),
        ValueError,
        ("heads='auto' needs num_heads=(H, H_kv)", "None"),
    ),
    "heads-auto-length": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 3), topology="dgx-h200"),
        ValueError,
        ("with a topology needs seq_len",),
    ),
    "heads-auto-no-length": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 3), seq_len=99),
        ValueError,
        ("without a topology", "takes no seq_len"),
    ),
    "heads-auto-kv": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 4)),
        ValueError,
        ("num_heads=(6, 4)", "divide H"),
    ),
    "num-heads-alone": (
        lambda g: ma.init_attention_mesh(g, num_heads=(6, 3)),
        ValueError,
        ("num_heads=(6, 3) is for heads='auto' alone", "heads=1"),
    ),
    "topology-name": (
        lambda g: ma.init_attention_mesh(g, topology="nowhere"),
        ValueError,
        ("topology nowhere", "presets are a3-high, dgx-h200"),
    ),
    "topology-kind": (
        lambda g: ma.init_attention_mesh(g, topology=8),
        ValueError,
        ("topology is 8", "path of its file"),
    ),
    "tile-beside-heads": (
        lambda g: ma.init_attention_mesh(g, heads=3, tile=(1, 3)),
        ValueError,
        ("tile 1x3 needs 9 ranks with heads=3 but the mesh has 3", "use one of 1x1"),
    ),
    "head-groups": (
        lambda g: ma.init_attention_mesh(g, heads=3, head_groups=0),
        ValueError,
        ("head_groups=0", "from 1 on, or 'auto'"),
    ),
    "head-groups-alone": (
        lambda g: ma.init_attention_mesh(g, head_groups=2),
        ValueError,
        ("head_groups=2 without a head axis", "pass heads="),
    ),
    "transport": (
        lambda g: ma.init_attention_mesh(g, transport="pigeon"),
        ValueError,
        ("'pigeon'", "auto, symmetric, p2p, threads"),
    ),
    "p2p-of-threads": (
        lambda g: ma.init_attention_mesh(g, transport="p2p"),
        ValueError,
        ("transport='p2p'", "simulated group"),
    ),
    "timeout": (
        lambda g: ma.init_attention_mesh(g, timeout=timedelta(0)),
        ValueError,
        ("timeout is 0", "seconds"),
    ),
    "no-group": (
        lambda g: ma.init_attention_mesh(),
        ValueError,
        ("no process group", "torchrun", "init_process_group"),
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_wrong_meshes(name: str) -> None:
    build, kind, fragments = MESHES[name]

    def on_rank(group: SimulatedGroup) -> str:
        with pytest.raises(kind) as info:
            build(group)
        return str(info.value)

    texts = set(run_ranks(RANKS, on_rank))
    assert len(texts) == 1
    for fragment in fragments:
        assert fragment in next(iter(texts))


GROUPS: dict[str, tuple[Callable[[], Any], Words]] = {
    "threads-of-processes": (
        lambda: ma.init_attention_mesh(transport="threads"),
        ("transport='threads'", "use 'p2p'"),
    ),
    "repeated-rank": (lambda: ma.init_attention_mesh([0, 0]), ("group=[0, 0]", "different ranks of the 2")),
    "rank-beyond": (lambda: ma.init_attention_mesh([0, 1, 2]), ("group=[0, 1, 2]", "the 2 that there are")),
    "a-number": (lambda: ma.init_attention_mesh(2), ("group is a int", "list of global ranks")),  # type: ignore[arg-type]
    "a-word": (lambda: ma.init_attention_mesh("01"), ("group is a str", "DeviceMesh axis")),
    "two-axes": (
        lambda: ma.init_attention_mesh(DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "cp"))),
        ("2 axes", "device_mesh['cp']"),
    ),
}


def test_wrong_groups() -> None:
    """One process group for all of them; a rank outside of a list is told so, the member goes on."""

    def on_rank(_: object) -> list[str]:
        texts = []
        for build, _fragments in GROUPS.values():
            with pytest.raises(ValueError) as info:
                build()
            texts.append(str(info.value))
        if torch.distributed.get_rank() == 1:
            with pytest.raises(ValueError, match=r"rank 1 is not in the group \[0\]: only its members"):
                ma.init_attention_mesh([0])
        else:
            assert ma.init_attention_mesh([0]).size == 1
        return texts

    for texts in run_ranks(2, on_rank, "gloo"):
        for text, (_build, fragments) in zip(texts, GROUPS.values(), strict=True):
            for fragment in fragments:
                assert fragment in text


def test_ring_attention_refuses_the_same() -> None:
    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        x = torch.ones(2, ROWS, 4, 8)
        with pytest.raises(ValueError, match="softcap"):
            ma.ring_attention(x, x, x, mesh.sequence(SEQ_LEN), softcap=True)
        with pytest.raises(NotImplementedError, match="alibi_slopes is no option of this attention"):
            ma.ring_attention(x, x, x, mesh.sequence(SEQ_LEN), alibi_slopes=x)  # type: ignore[arg-type]

    run_ranks(RANKS, on_rank)


def test_hints_lead_to_options_that_exist() -> None:
    """From names that other attention calls have, and none of ours."""
    options = inspect.signature(ma.mesh_attention).parameters
    for name, hint in _INSTEAD.items():
        assert name not in options
        for named in re.findall(r"the name is (\w+)", hint):
            assert named in options


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("name", ["attn_mask", "windowsize"])
def test_an_unknown_option_of_one_rank_is_everybodys(name: str, backend: Backend) -> None:
    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=5.0)
        seq = mesh.sequence(SEQ_LEN)
        x = torch.ones(2, seq.rows, 4, 8)
        with pytest.raises(NotImplementedError) as info:
            ma.mesh_attention(x, x, x, seq, **({name: 0.1} if mesh.rank == 1 else {}))
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank, backend)):
        assert f"{name} is no option" in text and (rank == 1 or text.startswith("rank 1:"))


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
