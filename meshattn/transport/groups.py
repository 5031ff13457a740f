"""Process groups: the ranks that a user means, and a group of their own for a mesh."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

_opened: Counter[tuple[int, ...]] = Counter()  # meshes of this process so far, by their global ranks


def global_ranks(group: dist.ProcessGroup | DeviceMesh | Sequence[int] | None) -> tuple[int, ...]:
    """Global ranks in mesh order: the order of the DeviceMesh or of the list that was given."""
    if not dist.is_initialized():
        raise ValueError(
            "there is no process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() before init_attention_mesh()"
        )
    if group is None:
        return tuple(range(dist.get_world_size()))
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {group.ndim} axes {group.mesh_dim_names}: pass the one axis that shares "
                "a sequence, as in device_mesh['cp']"
            )
        ranks = tuple(int(rank) for rank in group.mesh.flatten().tolist())
    elif isinstance(group, dist.ProcessGroup):
        ranks = tuple(dist.get_process_group_ranks(group))
    elif isinstance(group, Sequence) and not isinstance(group, str):
        ranks = tuple(group)
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < dist.get_world_size() for rank in ranks):
            raise ValueError(
                f"group={list(ranks)} must list different ranks of the {dist.get_world_size()} that there are"
            )
    else:
        raise ValueError(
            f"group is a {type(group).__name__}: pass a ProcessGroup, a DeviceMesh axis, a list of global "
            "ranks, or None for the default group"
        )
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the group {list(ranks)}: only its members may build the mesh"
        )
    return ranks


def new_group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    """A process group of these global ranks, made by its members alone.

    ``new_group(use_local_synchronization=True)`` would name it after the number of groups that this process
    happens to have: members that have made different numbers of other groups would wait for each other in
    vain, and a name, with its old keys in the store, would come back after a group is destroyed. So the name
    is made of what all members know: who they are, and how many meshes they have opened together.
    """
    number = _opened[ranks]
    _opened[ranks] += 1
    title = hashlib.sha1(repr((ranks, number)).encode(), usedforsecurity=False).hexdigest()
    world, everybody = c10d._world, dist.group.WORLD
    assert everybody is not None
    backend, store = world.pg_map[everybody]
    # With a device bound to the default group, PyTorch would split its communicator, which takes all ranks.
    device, everybody.bound_device_id = everybody.bound_device_id, None
    options = None
    if dist.is_nccl_available() and "nccl" in dist.get_backend_config(everybody):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout
    try:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            list(ranks),
            dist.Backend(backend),
            store,
            f"meshattn/{title}",  # type: ignore[arg-type]
            timeout=timeout,
            backend_options=options,
            group_desc="meshattn",
        )
    finally:
        everybody.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup)
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def store_of(group: dist.ProcessGroup) -> Store:
    """The key-value store of a group."""
    store: Store = c10d._get_process_group_store(group)
    return store


def end_group(group: dist.ProcessGroup) -> None:
    """Destroy it, unless it went with all others."""
    if dist.is_initialized():
        dist.destroy_process_group(group)
