"""The edge to PyTorch on a GPU with the default kernel: views, autocast, compile, checkpoints, and a host
that never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import meshattn as ma
from meshattn.plan import Tile
from meshattn.testing import run_ranks

B, H, H_KV, D, SEQ_LEN = 2, 4, 2, 64, 515
LONG = 2_000_000_000
"""Cycles of a GPU: about a second."""
Leaves = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def leaves(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Leaves, Tensor]:
    """q, k, v that require grad, and the gradient of out."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(heads: int) -> Tensor:
        return torch.randn(B, rows, heads, D, device="cuda", dtype=dtype, generator=generator)

    q, k, v, do = normal(H), normal(H_KV), normal(H_KV), normal(H)
    return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), do


def results(attend: Attend, inputs: Leaves, do: Tensor) -> list[Tensor]:
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, do)]


def on_one_rank(fn: Callable[[Attend, int], Any]) -> Any:
    """Calls ``fn`` with causal attention over one simulated rank, and the rows of it."""

    def on_rank(group: Any) -> Any:
        mesh = ma.init_attention_mesh(group)
        seq = mesh.sequence(SEQ_LEN)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = ma.mesh_attention(q, k, v, seq, causal=True)
            assert isinstance(out, Tensor)
            return out

        return fn(attend, seq.rows)

    return run_ranks(1, on_rank)[0]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert [x.dtype for x in actual] == [x.dtype for x in expected]
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert torch.equal(x, y), f"{name} has other bits"


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_other(x: Tensor) -> Tensor:
    """Its rows lie two rows apart, and its numbers two numbers apart."""
    return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=3)[:, ::2, :, ::2]


def shifted(x: Tensor) -> Tensor:
    """Begins at an address that is a multiple of no more than its type."""
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def negated(x: Tensor) -> Tensor:
    """Its memory has the other sign."""
    return torch._neg_view(-x)  # type: ignore[no-any-return]


class Late(Tensor):
    """Has no memory before it is waited for, as what a functional collective gives."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Late:
        like = {"dtype": inner.dtype, "device": inner.device, "strides": inner.stride()}
        made: Late = Tensor._make_wrapper_subclass(cls, inner.shape, **like)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def trigger_wait(self) -> Tensor:
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(x.inner if isinstance(x, Late) else x for x in args), **(kwargs or {}))


VIEWS: list[Callable[[Tensor], Tensor]] = [heads_first, every_other, shifted, negated, Late]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_inputs_of_any_strides_and_kinds(view: Callable[[Tensor], Tensor]) -> None:
    def both(attend: Attend, rows: int) -> None:
        inputs, do = leaves(rows)
        viewed = tuple(view(x.detach()).requires_grad_() for x in inputs)
        assert_equal(results(attend, viewed, view(do)), results(attend, inputs, do))  # type: ignore[arg-type]

    on_one_rank(both)


def test_q_k_v_from_one_projection_and_an_expanded_gradient() -> None:
    def both(attend: Attend, rows: int) -> None:
        inputs, _ = leaves(rows)
        packed = torch.cat([x.detach() for x in inputs], dim=2).requires_grad_()
        out = attend(*packed.split([H, H_KV, H_KV], dim=2))
        out.sum().backward()  # type: ignore[no-untyped-call]
        expected = results(attend, inputs, torch.ones_like(out))
        assert packed.grad is not None
        assert_equal([out.detach(), *packed.grad.split([H, H_KV, H_KV], dim=2)], expected)

    on_one_rank(both)


def test_autocast_takes_the_kernel_of_its_type() -> None:
    def both(attend: Attend, rows: int) -> None:
        inputs, do = leaves(rows, torch.float32)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            cast = results(attend, inputs, do.bfloat16())
        lower = tuple(x.detach().bfloat16().requires_grad_() for x in inputs)
        expected = results(attend, lower, do.bfloat16())  # type: ignore[arg-type]
        assert cast[0].dtype == torch.bfloat16
        assert_equal(cast, [expected[0], *(x.float() for x in expected[1:])])

    on_one_rank(both)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    def both(attend: Attend, rows: int) -> None:
        inputs, do = leaves(rows)

        def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
            return out

        grads = []
        for call in (kept, attend):
            out = call(*inputs)
            out.backward(do)  # type: ignore[no-untyped-call]
            grads.append([out.detach(), *(x.grad for x in inputs)])
            for x in inputs:
                x.grad = None
        assert_equal(*grads)  # type: ignore[arg-type]

    on_one_rank(both)


def test_compiled_callers() -> None:
    def both(attend: Attend, rows: int) -> None:
        inputs, do = leaves(rows)

        def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q * 2, k, v) * 3

        compiled = torch.compile(layer, backend="aot_eager")
        assert_equal(results(compiled, inputs, do), results(layer, inputs, do))

    on_one_rank(both)


@pytest.mark.parametrize("kernel", [None, "triton", "triton-dash"])
def test_programs_whose_default_device_is_the_gpu(kernel: str | None) -> None:
    """Tables, masks and positions that the host makes stay there; the rows are a length of their own, so that
    nothing of it is known already."""

    def on_rank(group: Any) -> list[Tensor]:
        seq = ma.init_attention_mesh(group).sequence(SEQ_LEN + 2, cu_seqlens=[0, 99, 99, 400])
        (q, k, v), do = leaves(seq.rows)

        def attend(*inputs: Tensor) -> Tensor:
            out = ma.mesh_attention(*inputs, seq, causal=True, kernel=kernel)
            assert isinstance(out, Tensor)
            return out

        return results(attend, (q, k, v), do)

    def by_default(group: Any) -> list[Tensor]:
        with torch.device("cuda"):
            return on_rank(group)

    (usual,), (found,) = run_ranks(1, on_rank), run_ranks(1, by_default)
    assert_equal(found, usual)


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(2, 2)], ids=str)
@pytest.mark.parametrize(
    "dtype, layout",
    [(torch.bfloat16, "striped"), (torch.bfloat16, "zigzag"), (torch.float32, "striped")],
    ids=str,
)
def test_the_host_never_waits_for_the_gpu(tile: Tile, dtype: torch.dtype, layout: Any) -> None:
    """After the first call, which makes tables: a wait would let the queue of the GPU run dry."""
    all_here = threading.Barrier(tile.ranks)

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group, tile=tile)
        seq = mesh.sequence(SEQ_LEN, layout=layout)
        inputs, do = leaves(seq.rows, dtype)

        def call() -> list[Tensor]:
            return results(lambda q, k, v: ma.mesh_attention(q, k, v, seq, causal=True), inputs, do)  # type: ignore[arg-type, return-value]

        first = call()
        all_here.wait(60)
        torch.cuda.set_sync_debug_mode("error")
        second = call()
        all_here.wait(60)
        torch.cuda.set_sync_debug_mode("default")
        all_here.wait(60)
        assert_equal(second, first)

    try:
        run_ranks(tile.ranks, on_rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kernel", [None, "triton", "triton-dash"])
def test_a_mask_that_is_new_does_not_wait_for_the_gpu(kernel: str | None) -> None:
    """Documents change with every step, and their tables are copied beside what the GPU has still to do. A
    graph, which could not hold such copies, is refused."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        inputs, do = leaves(SEQ_LEN)

        def call(border: int) -> list[Tensor]:
            seq = mesh.sequence(SEQ_LEN, cu_seqlens=[0, border, 300, SEQ_LEN])
            return results(
                lambda q, k, v: ma.mesh_attention(q, k, v, seq, causal=True, kernel=kernel),  # type: ignore[arg-type, return-value]
                inputs,
                do,
            )

        call(99)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        slept = torch.cuda.Event()
        slept.record()
        busy = call(101)
        assert not slept.query(), "the call came back after what stood before it on the GPU"
        torch.cuda.synchronize()
        assert_equal(busy, call(101))
        with (
            pytest.raises(RuntimeError, match="call attention once"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call(103)

    run_ranks(1, on_rank)


@pytest.mark.parametrize("kernel", [None, "triton", "triton-dash"])
def test_tables_that_one_stream_makes_serve_another(kernel: str | None) -> None:
    """The other stream has nothing to do, and would read them before they are there."""

    def on_rank(group: Any) -> None:
        mesh = ma.init_attention_mesh(group)
        inputs, do = leaves(SEQ_LEN)
        others = [x.detach().clone().requires_grad_() for x in inputs]
        elsewhere: Any = torch.cuda.Stream()

        def call(border: int) -> Callable[[Any], list[Tensor]]:
            seq = mesh.sequence(SEQ_LEN, cu_seqlens=[0, border, 301, SEQ_LEN])
            return lambda given: results(
                lambda q, k, v: ma.mesh_attention(q, k, v, seq, causal=True, kernel=kernel),  # type: ignore[arg-type, return-value]
                given,
                do,
            )

        call(99)(inputs)
        call_here = call(101)
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        here = call_here(inputs)
        with torch.cuda.stream(elsewhere):
            there = call_here(others)
        torch.cuda.synchronize()
        assert_equal(there, here)

    run_ranks(1, on_rank)
