"""Passes of one rank that recur on a GPU are recorded and keep their bits, whatever else goes on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import meshattn as ma
from meshattn import calls
from meshattn.testing import run_ranks
from meshattn_kernels.hopper import kernel as hopper
from meshattn_kernels.hopper import plans
from meshattn_kernels.portable import kernel as portable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
B, S, H, H_KV, D = 2, 1031, 6, 3, 64
ROUNDS = 6
DOCUMENTS = (0, 3, 500, 1031)


class _Layer:
    """Attention on inputs that stay where they are and get other numbers."""

    def __init__(self, mesh: ma.AttentionMesh, kernel: str, **options: Any) -> None:
        self.mesh = mesh
        self.seq = mesh.sequence(S, cu_seqlens=DOCUMENTS if options.pop("documents", False) else None)
        self.options = {"causal": True, "kernel": kernel} | options
        sizes = ((B, S, H, D), (B, S, H_KV, D), (B, S, H_KV, D), (B, S, H, D))
        self.tensors = [torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in sizes]

    def run(self, seed: int) -> list[Tensor]:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        for x in self.tensors:
            x.detach_().normal_(generator=generator)
        q, k, v = (x.requires_grad_() for x in self.tensors[:3])
        out = ma.mesh_attention(q, k, v, self.seq, **self.options)
        assert isinstance(out, Tensor)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), self.tensors[3])]

    @property
    def recordings(self) -> int:
        recorder = self.mesh.recorder(self.tensors[0].device)
        return 0 if recorder is None else recorder.recordings


def _equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _kernel(name: str) -> str:
    if name == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return name


def _on_one_rank(check: Callable[[ma.AttentionMesh, ma.AttentionMesh], None]) -> None:
    """With a mesh, and with one that records nothing."""

    def on_rank(group: Any) -> None:
        meshes = [ma.init_attention_mesh(group, cuda_graphs=yes) for yes in (True, False)]
        check(*meshes)
        for mesh in meshes:
            mesh.close()

    run_ranks(1, on_rank, timeout=250)


@pytest.mark.parametrize("mask", ["causal", "window", "documents", "full"])
@pytest.mark.parametrize("name", ["hopper", "triton", "triton-dash"])
def test_recorded_passes_have_the_bits_of_others(name: str, mask: str) -> None:
    options: dict[str, Any] = {
        "causal": {},
        "window": {"window_size": (130, 0)},
        "documents": {"documents": True},
        "full": {"causal": False},
    }[mask]
    kernel = _kernel(name)

    def check(mesh: ma.AttentionMesh, plain_mesh: ma.AttentionMesh) -> None:
        layer, plain = _Layer(mesh, kernel, **options), _Layer(plain_mesh, kernel, **options)
        for seed in range(ROUNDS):
            assert _equal(layer.run(seed), plain.run(seed)), f"round {seed}"
        assert layer.recordings >= 2 and plain.recordings == 0

    _on_one_rank(check)


@pytest.mark.parametrize("name", ["hopper", "triton"])
def test_recordings_may_all_go_and_others_come(name: str) -> None:
    """With the sequence that they belong to, or by order of a transport."""
    kernel = _kernel(name)

    def check(mesh: ma.AttentionMesh, plain_mesh: ma.AttentionMesh) -> None:
        plain = _Layer(plain_mesh, kernel)
        for number in range(3):
            layer = _Layer(mesh, kernel)
            for seed in range(ROUNDS):
                assert _equal(layer.run(seed), plain.run(seed)), f"layer {number}, round {seed}"
            assert layer.recordings >= 2
            recorder = mesh.recorder(layer.tensors[0].device)
            assert recorder is not None
            if number == 1:
                recorder.clear()
            del layer
            gc.collect()
            torch.cuda.empty_cache()
            assert recorder.recordings == 0

    _on_one_rank(check)


def test_what_differs_from_call_to_call_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws other numbers, and long blocks do not need it."""

    def check(mesh: ma.AttentionMesh, _: ma.AttentionMesh) -> None:
        dropping = _Layer(mesh, "triton", dropout_p=0.25)
        first = [dropping.run(1)[0] for _ in range(ROUNDS)]
        assert not torch.equal(first[-1], first[-2]) and dropping.recordings == 0
        monkeypatch.setattr(calls, "_LONG_BLOCK", 1.0)
        long = _Layer(mesh, "triton")
        for seed in range(ROUNDS):
            long.run(seed)
        assert long.recordings == 0

    _on_one_rank(check)


def _forget_tables() -> None:
    """As caches do where calls are of very many kinds."""
    plans._of_bands._last.clear()
    portable._placed._last.clear()
    for kept in (hopper._forwards, hopper._backwards):
        kept._known.clear()
    gc.collect()


@pytest.mark.parametrize("kernel", ["hopper", "triton-dash"])
def test_what_caches_forgot_is_recorded(kernel: str) -> None:
    """A capture can make no tables; those of the run before are kept for it."""
    name = _kernel(kernel)

    def check(mesh: ma.AttentionMesh, plain_mesh: ma.AttentionMesh) -> None:
        layer = _Layer(mesh, name)
        want = layer.run(7)
        for _ in range(ROUNDS):
            _forget_tables()
            assert _equal(layer.run(7), want)
        assert layer.recordings > 0

    _on_one_rank(check)


@pytest.mark.parametrize("whose", ["mesh", "user"])
def test_tables_outlive_the_caches_they_came_from(whose: str) -> None:
    """A graph reads them at every launch."""
    kernel = _kernel("hopper")

    def check(mesh: ma.AttentionMesh, plain_mesh: ma.AttentionMesh) -> None:
        layer, plain = _Layer(mesh, kernel), _Layer(plain_mesh, kernel)
        want = layer.run(7)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        for _ in range(ROUNDS):
            layer.run(7)
        if whose == "user":
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                q, k, v = (x.requires_grad_() for x in plain.tensors[:3])
                plain.run(7)
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, stream=stream):
                    out = ma.mesh_attention(q, k, v, plain.seq, **plain.options)
                    assert isinstance(out, Tensor)
                    captured = [out.detach(), *torch.autograd.grad(out, (q, k, v), plain.tensors[3])]
            torch.cuda.synchronize()
        _forget_tables()
        torch.cuda.synchronize()
        poison = [torch.full((size,), 2**30, dtype=torch.int32, device="cuda") for size in range(1, 4000, 7)]
        if whose == "user":
            graph.replay()
            assert _equal(captured, want)
        else:
            assert _equal(layer.run(7), want)
        del poison

    _on_one_rank(check)
