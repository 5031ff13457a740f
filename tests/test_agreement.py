"""Ranks that are called with different arguments: found out, named on every rank, never a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import meshattn as ma
from distributed import Backend
from meshattn.agreement import RankMismatchError
from meshattn.disagreement import RULE, absence
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks
from meshattn.transport.base import TransportError
from meshattn.trouble import Trouble

RANKS = 3
ODD = 1  # the rank that differs
TIMEOUT = {"threads": 1.0, "gloo": 3.0}  # what the other ranks wait for one that went elsewhere
Call = Callable[[AttentionMesh], object]


def attend(
    mesh: AttentionMesh,
    *,
    seq_len: int = 12,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    seq = mesh.sequence(seq_len)
    q, k, v = (torch.ones(1, seq.rows, heads, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    return ma.mesh_attention(q, k, v, seq, **options)


def ring(mesh: AttentionMesh) -> Any:
    seq = mesh.sequence(12)
    x = torch.ones(1, seq.rows, 2, 8, requires_grad=True)
    return ma.ring_attention(x, x, x, seq)


def without_grad(mesh: AttentionMesh) -> Any:
    with torch.no_grad():
        return attend(mesh)


def unshard(mesh: AttentionMesh) -> Any:
    seq = mesh.sequence(12)
    return seq.unshard(torch.zeros(1, seq.rows))


OTHERWISE: dict[str, tuple[Call, tuple[str, ...]]] = {
    "batch-heads": (
        lambda mesh: attend(mesh, heads=4),
        ("q, k and v are [1, 4, 4, 8]", "on rank 1, but [1, 4, 2, 8]"),
    ),
    "length": (lambda mesh: attend(mesh, seq_len=11), ("sequence is", "11 tokens", "12 tokens")),
    "dtype": (lambda mesh: attend(mesh, dtype=torch.bfloat16), ("torch.bfloat16", "torch.float32")),
    "causal": (
        lambda mesh: attend(mesh, causal=True),
        ("causal is True on rank 1, but False on ranks 0, 2",),
    ),
    "reduce_dtype": (
        lambda mesh: attend(mesh, reduce_dtype=torch.float32),
        ("reduce_dtype is torch.float32 on rank 1",),
    ),
    "softmax_scale": (lambda mesh: attend(mesh, softmax_scale=0.5), ("softmax_scale is 0.5 on rank 1",)),
    "return_lse": (lambda mesh: attend(mesh, return_lse=True), ("return_lse is True on rank 1",)),
    "no-grad": (
        without_grad,
        ("q, k and v are [1, 4, 2, 8] torch.float32 on cpu on rank 1", "with grad on ranks 0, 2"),
    ),
    "ring": (ring, ("ring_attention", "mesh_attention")),
    "unshard": (unshard, ("unshard", "mesh_attention")),
}


def _failures(call_number: int, otherwise: Call, backend: Backend) -> list[Exception]:
    """What each rank raises when rank 1 makes another call as its n-th."""

    def on_rank(group: Any) -> tuple[Exception | None]:
        mesh = ma.init_attention_mesh(group, tile=(1, RANKS), timeout=TIMEOUT[backend])
        try:
            for _ in range(1, call_number):  # forward and backward in turn: from the third on it is foreseen
                attend(mesh).sum().backward()
            (otherwise if mesh.rank == ODD else attend)(mesh)
        except (ValueError, NotImplementedError, TransportError) as error:
            return (error,)  # not raised: on simulated ranks that would end the wait of the others
        return (None,)

    answers = run_ranks(RANKS, on_rank, backend, timeout=30)
    failures = [failure for (failure,) in answers if failure is not None]
    assert len(failures) == RANKS, f"not all ranks failed: {answers}"
    return failures


@pytest.mark.timeout(40)
@pytest.mark.parametrize("name", OTHERWISE)
def test_another_first_call_is_named_on_all_ranks(name: str) -> None:
    otherwise, expected = OTHERWISE[name]
    failures = _failures(1, otherwise, "threads")
    assert len({str(failure) for failure in failures}) == 1, "all ranks say the same"
    for failure in failures:
        assert isinstance(failure, RankMismatchError)
        for fragment in (*expected, "the ranks disagree", "call 1"):
            assert fragment in str(failure)


@pytest.mark.timeout(40)
@pytest.mark.parametrize(
    "name, backend",
    [("batch-heads", "threads"), ("causal", "threads"), ("unshard", "threads"), ("causal", "gloo")],
)
def test_another_third_call_is_named_on_all_ranks(name: str, backend: Backend) -> None:
    """The others foresaw their third call and wait for data: they look into the store when that fails."""
    otherwise, expected = OTHERWISE[name]
    failures = _failures(3, otherwise, backend)
    for rank, failure in enumerate(failures):
        assert isinstance(failure, RankMismatchError), f"rank {rank}: {failure!r}"
        if rank == ODD:
            assert "ranks 0, 2 did not come to it" in str(failure)
            assert "rank 1 left the pattern of calls" in str(failure)
        else:
            for fragment in (*expected, "rank 1"):
                assert fragment in str(failure)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("call_number", [1, 3])
def test_a_mesh_closed_on_one_rank_alone_is_named(call_number: int, backend: Backend) -> None:
    """Also where the others foresaw their call; and a rank that closes last finds nothing wrong."""

    def close(mesh: AttentionMesh) -> None:
        mesh.close()
        raise ValueError("closed")  # so that it is one of the failures

    for rank, failure in enumerate(_failures(call_number, close, backend)):
        assert type(failure) in (ValueError, RankMismatchError)
        if rank != ODD:
            assert f"rank {ODD}: the mesh has been closed there: close it on all ranks" in str(failure)


def _wrong(mesh: AttentionMesh) -> Any:
    return attend(mesh, softmax_scale=-1.0)


def _transformed(mesh: AttentionMesh) -> Any:
    """PyTorch would refuse it behind the agreement."""
    return torch.func.grad(lambda x: x * attend(mesh).sum())(torch.ones(()))


def _with_tangent(mesh: AttentionMesh) -> Any:
    """This too."""
    seq = mesh.sequence(12)
    q, k, v = (torch.ones(1, seq.rows, 2, 8, requires_grad=True) for _ in range(3))
    with forward_ad.dual_level():
        return ma.mesh_attention(q, forward_ad.make_dual(k, torch.ones_like(k)), v, seq)


def _packed(mesh: AttentionMesh) -> Any:
    seq = mesh.sequence(12, cu_seqlens=[0, 5, 12])
    x = torch.ones(1, seq.rows, 2, 8)
    return ma.mesh_attention(x, x, x, seq)


def _missing(mesh: AttentionMesh) -> Any:
    trouble = Trouble()
    with trouble:
        raise NotImplementedError("this option is not there yet")
    return mesh.agreement.enter("mesh_attention", {}, trouble)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("call_number", [1, 3], ids="call-{}".format)
@pytest.mark.parametrize(
    "otherwise, kind, text",
    [
        (_wrong, ValueError, "softmax_scale is -1.0"),
        (_missing, NotImplementedError, "is not there yet"),
        (_transformed, ValueError, "inside a transform of torch.func"),
        (_with_tangent, ValueError, "k has a tangent of forward-mode AD"),
    ],
    ids=["wrong", "not-implemented", "transformed", "tangent"],
)
def test_an_error_of_one_rank_is_everybodys(
    otherwise: Call, kind: type[Exception], text: str, call_number: int, backend: Backend
) -> None:
    with forward_ad.dual_level():  # what PyTorch loads for the first tangent can take the ranks' patience
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
    failures = _failures(call_number, otherwise, backend)
    for rank, failure in enumerate(failures):
        assert isinstance(failure, kind if rank == ODD or call_number == 1 else ValueError)
        assert text in str(failure)
        assert rank == ODD or f"rank {ODD}: " in str(failure)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_freed_tensor_is_found_where_a_call_looks_like_those_before(backend: Backend) -> None:
    """It would fail in the middle of an exchange."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, tile=(1, RANKS), timeout=20.0)
        seq = mesh.sequence(12)
        q, k, v = (torch.ones(1, seq.rows, 2, 8, requires_grad=True) for _ in range(3))
        for _ in range(3):
            ma.mesh_attention(q, k, v, seq)
        if mesh.rank == ODD:
            k.untyped_storage().resize_(0)
        with pytest.raises(ValueError) as info:
            ma.mesh_attention(q, k, v, seq)
        return str(info.value)

    for rank, text in enumerate(run_ranks(RANKS, on_rank, backend, timeout=30)):
        assert "k is a Tensor on cpu without memory of its own" in text
        assert rank == ODD or f"rank {ODD}: " in text


@pytest.mark.timeout(40)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize(
    "otherwise",
    [_wrong, _packed, OTHERWISE["causal"][0], ring, unshard],
    ids=["wrong", "documents", "causal", "ring", "unshard"],
)
def test_calls_go_on_after_an_error_that_all_ranks_saw(otherwise: Call, backend: Backend) -> None:
    """The failed call of one rank must not leave it out of step with the others, whatever it called, nor may
    the backward pass of an earlier call."""
    usual = partial(attend, causal=True, softmax_scale=0.25)

    def on_rank(group: Any) -> list[Tensor]:
        mesh = ma.init_attention_mesh(group, tile=(1, RANKS), timeout=TIMEOUT[backend])
        earlier = attend(mesh)
        with pytest.raises(ValueError):
            (otherwise if mesh.rank == ODD else usual)(mesh)
        attend(mesh)
        usual(mesh)  # at the place where the ranks parted: none may foresee what it did there alone
        earlier.sum().backward()
        ring(mesh).sum().backward()
        return [attend(mesh).detach() for _ in range(4)]

    for outs in run_ranks(RANKS, on_rank, backend, timeout=30):
        assert len(outs) == 4 and all(torch.equal(out, torch.ones_like(out)) for out in outs)


@pytest.mark.timeout(60)
def test_all_ranks_changing_together_is_fine() -> None:
    """Other shapes, types and options at every step, and back again; forward and backward."""

    def on_rank(group: Any) -> list[Tensor]:
        mesh = ma.init_attention_mesh(group, tile=(1, RANKS), timeout=10.0)
        outs = []
        for step in range(3):
            for options in (
                {"seq_len": 11},
                {"heads": 4, "causal": True},
                {"dtype": torch.float64},
                {"seq_len": 5 + step},
            ):
                out = attend(mesh, **options)
                out.sum().backward()
                outs.append(out.detach())
            unshard(mesh)
            without_grad(mesh)
        return outs

    for outs in run_ranks(RANKS, on_rank):
        assert len(outs) == 12 and all(out.isfinite().all() for out in outs)


@pytest.mark.timeout(40)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_different_tiles_are_named(backend: Backend) -> None:
    def on_rank(group: Any) -> str:
        rank = group.rank if backend == "threads" else torch.distributed.get_rank()
        with pytest.raises(RankMismatchError) as info:
            ma.init_attention_mesh(group, tile=(2, 2) if rank == ODD else "auto", timeout=TIMEOUT[backend])
        return str(info.value)

    for text in run_ranks(4, on_rank, backend, timeout=30):
        assert "tile is 2x2 on rank 1, but auto on ranks 0, 2, 3" in text


def test_calls_of_two_kinds_are_told_apart_by_what_both_state() -> None:
    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=TIMEOUT["threads"])
        with pytest.raises(RankMismatchError) as info:
            (unshard if mesh.rank == ODD else attend)(mesh)
        return str(info.value)

    for text in run_ranks(RANKS, on_rank):
        assert "unshard, call 1 on rank 1" in text and "absent" not in text


@pytest.mark.timeout(40)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_who_evaluates_alone_reads_of_it(first: bool) -> None:
    """No other rank comes to the call: the message has that among the causes, and nothing internal."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=TIMEOUT["threads"])
        for _ in range(0 if first else 3):
            attend(mesh).sum().backward()
        if mesh.rank != ODD:
            return ""
        with pytest.raises(RankMismatchError) as info:
            without_grad(mesh)
        return str(info.value)

    text = run_ranks(RANKS, on_rank)[ODD]
    assert "ranks 0, 2 did not come to it" in text and "none evaluates" in text
    assert ("they go on with other arguments than here" if first else "left the pattern of calls") in text
    assert "unknown" not in text


@pytest.mark.timeout(40)
def test_one_rank_says_soon_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Long before the timeout, and though all come in the end."""
    monkeypatch.setattr("meshattn.agreement._QUIET", 0.2)

    together = threading.Barrier(RANKS)

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, timeout=30)
        together.wait()
        if mesh.rank == ODD:
            time.sleep(1.0)
        attend(mesh)

    run_ranks(RANKS, on_rank, timeout=30)
    (text,) = [record.getMessage() for record in caplog.records if "call 1" in record.getMessage()]
    assert text.startswith("rank 0 waits for up to 29.8 s more")
    assert "rank 1 did not come to it within 0.2 s" in text


@pytest.mark.timeout(40)
def test_a_backward_that_one_rank_leaves_out_is_told_briefly() -> None:
    """As after an error that it has caught: the next call is of another kind, so no item of it was another
    before."""

    def on_rank(group: Any) -> str:
        mesh = ma.init_attention_mesh(group, timeout=TIMEOUT["threads"])
        for _ in range(3):
            attend(mesh).sum().backward()
        out = attend(mesh)
        if mesh.rank != ODD:
            with pytest.raises(RankMismatchError) as info:
                out.sum().backward()
            return str(info.value)
        with pytest.raises(RankMismatchError) as info:
            attend(mesh)
        return str(info.value)

    texts = run_ranks(RANKS, on_rank)
    assert "in which backward was next (which an error that is caught may leave out)" in texts[ODD]
    assert all("absent" not in text for text in texts)


def test_a_call_that_only_leaves_something_out_is_another_call() -> None:
    text = absence("attend, call 2", {"q": "alike"}, ("attend", {"q": "alike", "k": "other"}), [1], [0], 5)
    assert "in which attend was next: another call." in text


def test_the_first_number_that_differs_is_named() -> None:
    """Of lists whose digests differ; equal ones are not mentioned, whatever stands in the others."""
    lists = [[0, 3, 9], [0, 4, 9], [0, 3, 9, 9], [0, 9], [0, 39], []]
    expected = {(0, 1): "[1]", (0, 2): "length of", (0, 3): "[1]", (3, 4): "[1]", (4, 5): "length of"}

    def on_rank(group: Any) -> dict[tuple[int, int], str]:
        mesh = ma.init_attention_mesh(group, timeout=5.0)
        mesh.agreement.compare("equal", {}, lists={"cuts": lists[0]})
        texts = {}
        for pair in expected:
            with pytest.raises(RankMismatchError) as info:
                mesh.agreement.compare("cuts", {}, lists={"same": [7], "cuts": lists[pair[mesh.rank]]})
            texts[pair] = str(info.value)
        return texts

    first, second = run_ranks(2, on_rank)
    assert first == second
    for pair, words in expected.items():
        assert words in first[pair] and "same" not in first[pair].removesuffix(RULE)


def test_a_second_thread_in_a_call_is_refused() -> None:
    """Whatever it does: calls have one order, and buffers. The first one goes on, and calls inside calls."""

    def on_rank(group: Any) -> tuple[Tensor, Tensor, list[str]]:
        mesh = ma.init_attention_mesh(group)
        earlier, weight = attend(mesh), torch.ones(3, requires_grad=True)
        whole = ma.replicated(weight, mesh)
        texts = []

        def refused(call: Call) -> None:
            with pytest.raises(ValueError) as info:
                call(mesh)
            texts.append(str(info.value))

        def pack(x: Tensor) -> Tensor:  # PyTorch calls it inside of the second call
            if not texts:
                for call in (
                    attend,
                    unshard,
                    lambda _: earlier.sum().backward(),
                    lambda _: whole.sum().backward(),
                ):
                    thread = Thread(target=refused, args=(call,))
                    thread.start()
                    thread.join()
                unshard(mesh)
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attend(mesh)
        out.sum().backward()
        return out, earlier, texts

    for out, earlier, texts in run_ranks(2, on_rank):
        assert torch.equal(out, earlier) and len(texts) == 4
        assert all(text.startswith("another thread is in a call on this mesh") for text in texts)
