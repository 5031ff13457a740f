"""What is timed on several ranks: our tiles on each transport, the same without transfers, one GPU alone, and
torch's context parallelism. All behind one interface: enter, then forward and backward again and again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshattn as ma
from across_ranks.rank_cuts import name_of
from across_ranks.rank_transports import PlainP2P, Skipped
from meshattn.plan import CallShape
from meshattn.plan.placement import Cut

Grads = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """What is timed."""

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool
    layout: str
    kernel: str | None = None

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"B{self.batch}-S{self.seq_len}-H{self.heads}-H_kv{self.kv_heads}-D{self.head_dim}-{kind}-{mask}-"
            f"{self.layout}"
        )

    def shape(self, rows: int) -> CallShape:
        exact = 8 if self.dtype == torch.float64 else 4
        return CallShape(
            batch=self.batch,
            rows=rows,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim,
            itemsize=self.dtype.itemsize,
            reduce_itemsize=exact,
            acc_itemsize=exact,
            causal=self.causal,
        )

    def flop(self) -> dict[str, float]:
        """Of the products of each pass, over all ranks."""
        pairs = self.seq_len * (self.seq_len + 1) / 2 if self.causal else self.seq_len**2
        product = 2.0 * self.batch * self.heads * pairs * self.head_dim
        return {"forward": 2 * product, "backward": 5 * product, "both": 7 * product}

    def inputs(self, device: torch.device, seq_len: int | None = None) -> tuple[Tensor, ...]:
        """q, k, v, do [B, S, H, D], the same on every rank."""
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(heads: int) -> Tensor:
            size = (self.batch, seq_len or self.seq_len, heads, self.head_dim)
            return torch.randn(size, generator=generator, device=device).to(self.dtype)

        return normal(self.heads), normal(self.kv_heads), normal(self.kv_heads), normal(self.heads)


class Contender(Protocol):
    """A way to compute attention of one case; inside `entered` its passes may run."""

    name: str

    def entered(self) -> AbstractContextManager[None]: ...
    def forward(self) -> Tensor: ...
    def backward(self, out: Tensor) -> Grads: ...


class Ours:
    """`mesh_attention` on a mesh."""

    def __init__(self, name: str, mesh: ma.AttentionMesh, case: Case, device: torch.device) -> None:
        self.name = name
        self.mesh = mesh
        self._case = case
        self._seq = mesh.sequence(case.seq_len, layout=case.layout)  # type: ignore[arg-type]
        q, k, v, self._do = (self._seq.shard(x) for x in case.inputs(device))
        self._inputs = tuple(x.requires_grad_() for x in (q, k, v))

    @property
    def rows(self) -> int:
        return self._seq.rows

    def entered(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward(self) -> Tensor:
        out = ma.mesh_attention(*self._inputs, self._seq, causal=self._case.causal, kernel=self._case.kernel)
        assert isinstance(out, Tensor)
        return out

    def backward(self, out: Tensor) -> Grads:
        return torch.autograd.grad(out, self._inputs, self._do)

    def whole(self) -> tuple[Tensor, ...]:
        """out, dq, dk, dv [B, S, H, D] of all ranks."""
        out = self.forward()
        return tuple(self._seq.unshard(x.detach()) for x in (out, *self.backward(out)))


class Awake:
    """Another contender, with every pass pushing a little to the next GPU, for which nothing waits.

    Links between GPUs sleep 50 ms after their last transfer. Awake they take some 3 % of the power that GPUs
    are limited to, and the kernels, whatever they are, run at a clock so much lower: what a pass with
    transfers takes beyond this is due to the transfers, and not to there being any.
    """

    PUSHED = 16 * 2**20

    def __init__(self, inner: Ours, connected: ma.AttentionMesh) -> None:
        """``connected``: any mesh of all ranks on copy engines."""
        self.name = f"{inner.name} awake"
        self.inner = inner
        connection = connected.connection
        assert connection.engine is not None
        self._engine = connection.engine
        self._region = connection.engine.allocate(self.PUSHED)
        self._to = self._region.addresses[(connection.rank + 1) % connection.size]
        self._event = self._engine.event()

    def entered(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _push(self) -> None:
        ops = self._engine.ops
        ops.record(self._event, ops.current_stream())
        ops.wait_event(ops.comm_stream, self._event)
        ops.copy(ops.comm_stream, self._to, self._region.local.data_ptr(), self.PUSHED)

    def forward(self) -> Tensor:
        self._push()
        return self.inner.forward()

    def backward(self, out: Tensor) -> Grads:
        self._push()
        return self.inner.backward(out)


class Captured:
    """Both passes of another contender as CUDA graphs: the GPU's time without the host's."""

    def __init__(self, inner: Ours) -> None:
        self.name = f"{inner.name} graph"
        self.inner = inner
        self._forward = torch.cuda.CUDAGraph()
        self._backward = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                inner.backward(inner.forward())
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(self._forward):
            self._out = inner.forward()
        with torch.cuda.graph(self._backward, pool=self._forward.pool()):
            self._grads = inner.backward(self._out)

    def close(self) -> None:
        """Before the mesh is closed: NCCL waits for graphs that know it."""
        self._forward.reset()
        self._backward.reset()

    def entered(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def forward(self) -> Tensor:
        self._forward.replay()
        return self._out

    def backward(self, out: Tensor) -> Grads:
        self._backward.replay()
        return self._grads


def alone(case: Case, device: torch.device, timeout: float) -> Ours:
    """One rank by itself with as many products as it has among all: what its kernel can do."""
    ranks = dist.get_world_size()
    rows = math.sqrt(case.seq_len**2 / ranks)
    mine = replace(case, seq_len=max(1, round(rows / 128)) * 128)
    mesh = ma.init_attention_mesh([dist.get_rank()], tile=(1, 1), timeout=timeout)
    return Ours("one GPU", mesh, mine, device)


class TorchContextParallel:
    """``torch.distributed.tensor.experimental.context_parallel`` over all ranks, causal, its own layout."""

    def __init__(self, backend: str, case: Case, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.name = f"torch {backend}"
        self._backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}[backend]
        self._case = case
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._device = device
        self._inputs: tuple[Tensor, ...] = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel

        buffers = [x.transpose(1, 2).contiguous() for x in self._case.inputs(self._device)]
        with (
            context_parallel(self._mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
            sdpa_kernel(self._backend),
        ):
            self._inputs = tuple(x.requires_grad_() for x in buffers[:3])
            self._do = buffers[3]
            yield
            for x in buffers[:3]:
                x.requires_grad_(False)
        self._inputs = ()

    def forward(self) -> Tensor:
        q, k, v = self._inputs
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=self._case.causal, enable_gqa=self._case.heads != self._case.kv_heads
        )

    def backward(self, out: Tensor) -> Grads:
        return torch.autograd.grad(out, self._inputs, self._do)


def ours_by_transport(
    case: Case, cut: Cut, transport: str, device: torch.device, timeout: float
) -> Callable[[], Ours]:
    """Makes the contender of a cut on a transport, "/" and its number of head groups behind it if that is not
    what the mesh takes; "skipped" moves nothing, "plain" as PyTorch does by itself."""
    name, _, groups = transport.partition("/")
    instead = {"skipped": Skipped, "plain": PlainP2P}.get(name)

    def make() -> Ours:
        mesh = ma.init_attention_mesh(
            tile=cut.tile,
            heads=cut.heads,
            head_groups=int(groups) if groups else "auto",
            transport="p2p" if instead else name,
            timeout=timeout,
        )
        if instead:
            connection = mesh.connection
            mesh.connection = replace(connection, transport=instead(connection.transport), nodes=())
        return Ours(f"{name_of(cut)} {transport}", mesh, case, device)

    return make
