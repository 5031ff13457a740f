"""Meshes and groups that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import meshattn as ma
from meshattn.testing import run_ranks
from meshattn.transport.threads import SimulatedGroup
from refused_calls import RANKS, check_refused

Words = tuple[str, ...]
MESHES: dict[str, tuple[Callable[[SimulatedGroup], Any], Words]] = {
    "tile-of-other-ranks": (
        lambda g: ma.init_attention_mesh(g, tile=(2, 2)),
        ("tile 2x2 needs 4 ranks but the mesh has 3", "1x3, 3x1"),
    ),
    "tile-text": (lambda g: ma.init_attention_mesh(g, tile="two"), ("'two'", "for example 2x4")),
    "tile-of-three": (
        lambda g: ma.init_attention_mesh(g, tile=(1, 3, 1)),
        ("(1, 3, 1)", "(a, b)"),
    ),
    "tile-of-zero": (lambda g: ma.init_attention_mesh(g, tile=(0, 3)), ("0x3", "at least 1")),
    "heads": (
        lambda g: ma.init_attention_mesh(g, heads=2),
        ("heads=2 must divide the 3 ranks", "use one of 1, 3"),
    ),
    "heads-text": (lambda g: ma.init_attention_mesh(g, heads="many"), ("heads='many'", "1, 3")),
    "heads-auto": (
        lambda g: ma.init_attention_mesh(g, heads="auto"),
        ("heads='auto' needs num_heads=(H, H_kv)", "None"),
    ),
    "heads-auto-length": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 3), topology="dgx-h200"),
        ("with a topology needs seq_len",),
    ),
    "heads-auto-no-length": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 3), seq_len=99),
        ("without a topology", "takes no seq_len"),
    ),
    "heads-auto-kv": (
        lambda g: ma.init_attention_mesh(g, heads="auto", num_heads=(6, 4)),
        ("num_heads=(6, 4)", "divide H"),
    ),
    "num-heads-alone": (
        lambda g: ma.init_attention_mesh(g, num_heads=(6, 3)),
        ("num_heads=(6, 3) is for heads='auto' alone", "heads=1"),
    ),
    "topology-name": (
        lambda g: ma.init_attention_mesh(g, topology="nowhere"),
        ("topology nowhere", "presets are a3-high, dgx-h200"),
    ),
    "topology-kind": (
        lambda g: ma.init_attention_mesh(g, topology=8),
        ("topology is 8", "path of its file"),
    ),
    "tile-beside-heads": (
        lambda g: ma.init_attention_mesh(g, heads=3, tile=(1, 3)),
        ("tile 1x3 needs 9 ranks with heads=3 but the mesh has 3", "use one of 1x1"),
    ),
    "head-groups": (
        lambda g: ma.init_attention_mesh(g, heads=3, head_groups=0),
        ("head_groups=0", "from 1 on, or 'auto'"),
    ),
    "head-groups-alone": (
        lambda g: ma.init_attention_mesh(g, head_groups=2),
        ("head_groups=2 without a head axis", "pass heads="),
    ),
    "transport": (
        lambda g: ma.init_attention_mesh(g, transport="pigeon"),
        ("'pigeon'", "auto or threads, as the group is simulated"),
    ),
    "p2p-of-threads": (
        lambda g: ma.init_attention_mesh(g, transport="p2p"),
        ("transport='p2p'", "simulated group"),
    ),
    "timeout": (
        lambda g: ma.init_attention_mesh(g, timeout=timedelta(0)),
        ("timeout is 0", "seconds"),
    ),
    "no-group": (
        lambda g: ma.init_attention_mesh(),
        ("no process group", "torchrun", "init_process_group"),
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_wrong_meshes(name: str) -> None:
    build, fragments = MESHES[name]

    def on_rank(group: SimulatedGroup) -> str:
        with pytest.raises(ValueError) as info:
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
    "nccl": (
        lambda: ma.init_attention_mesh(transport="nccl"),
        ("'nccl' is unknown: choose one of auto, symmetric, p2p; p2p is the send and receive",),
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


def test_coordinates_need_a_tile() -> None:
    check_refused({"auto": (lambda m: m.coordinates(), ("'auto'", "pass a tile"))}, "auto")
