"""Memory of a forward and a backward pass on several ranks: measured, and by formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from across_ranks.rank_contenders import Case, Ours
from across_ranks.rank_cuts import formula_memory
from meshattn.command.blocks import Block, BlockSize, workspace_of
from meshattn.plan import CallShape
from meshattn.plan.heads import inner_shape
from meshattn.plan.placement import Cut
from meshattn_kernels import choose_kernel, get_kernel


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank beyond q, k, v and do."""

    buffers: int  # by the formula
    results: int  # out, lse, delta
    gradients: int
    own: int  # what the kernel keeps for itself while it runs
    peak: int  # measured on the rank where it is most, receive memory included; 0 on CPUs

    @property
    def expected(self) -> int:
        """While the kernel works, or when the gradients are written."""
        return self.buffers + self.results + max(self.own, self.gradients)


def memory_of(contender: Ours, cut: Cut, case: Case, device: torch.device) -> Memory:
    """Of one pass of a contender that has run before. Collective."""
    shape = case.shape(contender.rows)
    groups = contender.mesh.split_heads(shape, device)[1]
    held = allocated(device)
    out = contender.forward()
    gradients = contender.backward(out)
    peak = torch.tensor([peak_allocated(device) - held])
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    copying = contender.mesh.connection.copying
    received = 0 if copying is None else copying.receive_bytes
    return Memory(
        buffers=formula_memory(cut, shape, groups),
        results=out.nbytes + 2 * shape.query_rows * shape.acc_itemsize,
        gradients=sum(x.nbytes for x in gradients),
        own=_own(case, inner_shape(shape, cut.heads, groups), device),
        peak=int(peak) + received if device.type == "cuda" else 0,
    )


def _own(case: Case, block: CallShape, device: torch.device) -> int:
    """What the kernel keeps for itself for the block of a rank and head group."""
    if device.type != "cuda":
        return 0
    name = case.kernel or choose_kernel(None, device, case.dtype, case.head_dim, case.head_dim)
    heads, kv_heads = block.batch * block.heads, block.batch * block.kv_heads
    size = BlockSize(block.rows, heads, kv_heads, case.head_dim, case.dtype, case.causal)
    run = Block(get_kernel(name), size, device).passes["backward"]
    run()
    return workspace_of(run, device)


def allocated(device: torch.device) -> int:
    """Bytes that tensors take now; the peak is counted from here."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_allocated(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
