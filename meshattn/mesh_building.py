"""How ranks become a mesh: they connect, agree on what they were given, and choose transports."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from meshattn.agreement import Agreement
from meshattn.mesh import AttentionMesh
from meshattn.mesh_arguments import (
    TileLike,
    as_topology,
    auto_heads,
    check_switch,
    checked_heads,
    checked_tile,
    digest,
    seconds_of,
)
from meshattn.plan.assignment import Tile
from meshattn.plan.topology import Topology
from meshattn.transport.connect import Group, check_transport, choose, connect
from meshattn.trouble import Trouble

DEFAULT_TIMEOUT = 600.0


def init_attention_mesh(
    group: Group | None = None,
    *,
    tile: TileLike = "auto",
    heads: int | str = 1,
    head_groups: str | int = "auto",
    num_heads: tuple[int, int] | None = None,
    seq_len: int | None = None,
    topology: Topology | str | Path | None = None,
    transport: str = "auto",
    timeout: float | timedelta = DEFAULT_TIMEOUT,
    cuda_graphs: bool = True,
) -> AttentionMesh:
    """Build the mesh of ranks over which one sequence is spread. Collective over ``group``, and over it
    alone.

    Args:
        group: the ranks that share a sequence: a ProcessGroup, a DeviceMesh axis (coordinates follow its
            order), a list of global ranks (in that order), a simulated group, or None for the default
            group.
        tile: (a, b) or "AxB": every rank computes a query chunks against b key/value chunks, heads * a * b =
            P. (1, P) is Ring-Attention. "auto" takes the tile that moves the least bytes, or with a topology
            the one that takes the least time, at the first call of each shape.
        heads: ranks of the head axis (Ulysses): so many consecutive ranks exchange rows for heads before and
            after attention. It divides P and the query heads of every call. With the tile (1, P / heads) it
            is known as USP. "auto" takes the number that moves the least bytes for ``num_heads``, or with a
            topology the one that takes the least time for ``num_heads`` and ``seq_len``.
        head_groups: into how many groups each of these ranks splits its heads, to exchange one while another
            is computed; it divides the key/value heads of a rank. "auto" follows from the shape, and is 1
            where NCCL serves the head axis. Blocks are summed in the same order for every number; kernels
            that choose the order inside a block by its heads (hopper, triton-dash) may give other last bits.
        num_heads: (H, H_kv), the query and the key/value heads of the calls to come, for heads="auto" alone.
        seq_len: their global length, for heads="auto" with a topology alone.
        topology: the cluster, for "auto" and for the order of blocks and transfers, which otherwise is made
            for links of a nominal speed: a `meshattn.plan.topology.Topology`, its file, or the name of a
            preset (see docs/planning.md). Global ranks are taken to be numbered node by node. It must be the
            same on every rank: results have the same bits for the same topology.
        transport: "auto" takes the copy engines on the axes whose neighbours share a host and "p2p" on the
            others, found out by all ranks together; call torch.cuda.set_device before. "symmetric" insists on
            copy engines, "p2p" on torch.distributed send and receive (gloo, NCCL); a simulated group has
            "threads".
        timeout: how long a rank waits for another, in seconds or as a timedelta.
        cuda_graphs: whether short passes on a GPU that recur with tensors at the same addresses, as those of
            every step of a training do, run as CUDA graphs that the mesh records the third time. They save
            the host's time; bits are the same.

    Raises:
        ValueError: on every rank alike, for axes that do not multiply to P, an unknown transport or a wrong
            group.
    """
    chosen: Tile | None = None
    cluster: Topology | None = None
    head_ranks = 1
    trouble = Trouble()
    seconds = DEFAULT_TIMEOUT
    with trouble:
        seconds = seconds_of(timeout)
    connection = connect(group, seconds)
    agreement = Agreement(connection.store, connection.name, connection.names, seconds)
    with trouble:
        check_transport(transport, group)
        cluster = None if topology is None else as_topology(topology)
        wanted = auto_heads(heads, num_heads, seq_len, tile, connection.size, cluster)
        head_ranks = checked_heads(wanted, head_groups, connection.size)
        chosen = checked_tile(tile, connection.size, head_ranks)
        check_switch("cuda_graphs", cuda_graphs)
    stated = {
        "ranks": str(list(connection.names)),
        "tile": str(chosen or "auto"),
        "heads": str(head_ranks),
        "head_groups": str(head_groups),
        "topology": digest(cluster),
        "transport": str(transport),
    }
    try:
        agreement.enter("init_attention_mesh", stated, trouble)
        connection = choose(connection, transport)
    except ValueError:  # all ranks alike, and nothing is under way
        connection.abandon()
        raise
    return AttentionMesh(connection, agreement, chosen, head_ranks, head_groups, cluster, cuda_graphs)
