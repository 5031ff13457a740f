"""Distributed attention on a 2-D mesh of ranks.

Names are imported on first use, so that `import meshattn` and `import meshattn.plan` work where torch is not
installed: a planner or a doctor runs on a login node without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from meshattn.agreement import RankMismatchError
    from meshattn.attention import kernel_for, mesh_attention, ring_attention
    from meshattn.documents import cu_seqlens_from_end_tokens, cu_seqlens_from_position_ids
    from meshattn.mesh import AttentionMesh
    from meshattn.mesh_building import init_attention_mesh
    from meshattn.plan.placement import rank_order
    from meshattn.replicated import replicated
    from meshattn.sequence import ShardedSequence
    from meshattn.transport.base import TransportError

__all__ = [
    "AttentionMesh",
    "RankMismatchError",
    "ShardedSequence",
    "TransportError",
    "__version__",
    "cu_seqlens_from_end_tokens",
    "cu_seqlens_from_position_ids",
    "init_attention_mesh",
    "kernel_for",
    "mesh_attention",
    "rank_order",
    "replicated",
    "ring_attention",
]

_HOME = {
    "AttentionMesh": "meshattn.mesh",
    "RankMismatchError": "meshattn.agreement",
    "ShardedSequence": "meshattn.sequence",
    "TransportError": "meshattn.transport.base",
    "cu_seqlens_from_end_tokens": "meshattn.documents",
    "cu_seqlens_from_position_ids": "meshattn.documents",
    "init_attention_mesh": "meshattn.mesh_building",
    "kernel_for": "meshattn.attention",
    "mesh_attention": "meshattn.attention",
    "rank_order": "meshattn.plan.placement",
    "replicated": "meshattn.replicated",
    "ring_attention": "meshattn.attention",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
