"""What is left when meshes are closed or refused, and when process groups go first."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshattn as ma
from meshattn.mesh import AttentionMesh
from meshattn.testing import run_ranks

TASKS = Path("/proc/self/task")


def _used(mesh: AttentionMesh) -> None:
    x = torch.randn(1, 3, 2, 8, requires_grad=True)
    seq = mesh.sequence(6)
    out = ma.mesh_attention(x, x, x, seq)
    out.sum().backward()
    seq.unshard(out.detach())


def test_a_mesh_may_be_closed_after_all_groups() -> None:
    """Its own group went with them."""

    def on_rank(group: Any) -> bool:
        mesh = ma.init_attention_mesh()
        _used(mesh)
        dist.barrier()
        dist.destroy_process_group()
        mesh.close()
        return True

    assert run_ranks(2, on_rank, "gloo", timeout=60) == [True, True]


@pytest.mark.skipif(not TASKS.exists(), reason="threads are counted in Linux' /proc")
def test_closed_and_refused_meshes_have_no_threads_and_files() -> None:
    """Also while somebody still holds them: a thread of a group that outlives the interpreter may abort the
    process."""

    def held() -> tuple[int, int, int]:
        names = [(task / "comm").read_text() for task in TASKS.iterdir()]
        return (
            sum("gloo" in name for name in names),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
        )

    def on_rank(group: Any) -> bool:
        rank, meshes, counts = dist.get_rank(), [], []
        for _ in range(4):
            meshes.append(ma.init_attention_mesh())
            _used(meshes[-1])
            meshes[-1].close()
            for refused in (
                {"tile": "3x3"},
                {"tile": "1x2" if rank == 0 else "2x1"},
                {"tile": "1x2" if rank == 0 else "4x4"},
                {"transport": "symmetric"},
            ):
                with pytest.raises(ValueError, match=r"3x3|1x2|4x4|symmetric"):
                    ma.init_attention_mesh(timeout=20, **refused)
            dist.barrier()
            counts.append(held())
        return all(count == counts[0] for count in counts[1:])

    assert run_ranks(2, on_rank, "gloo", timeout=60) == [True, True]
