"""What is left when process groups go first."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import meshattn as ma
from meshattn.testing import run_ranks


def test_a_mesh_may_be_closed_after_all_groups() -> None:
    """Its own group went with them."""

    def on_rank(group: Any) -> bool:
        mesh = ma.init_attention_mesh()
        x = torch.randn(1, 3, 2, 8)
        ma.mesh_attention(x, x, x, mesh.sequence(6))
        dist.barrier()
        dist.destroy_process_group()
        mesh.close()
        return True

    assert run_ranks(2, on_rank, "gloo", timeout=60) == [True, True]
