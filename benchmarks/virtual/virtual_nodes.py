"""The plan of a virtual cluster, integers and addresses alone, and the network it describes.

Node i has the addresses 10.77.i.1 (its end at the switch) and 10.77.i.2, its ranks are consecutive, and rank
r uses GPU r mod the number of GPUs.

What leaves a node is held to its rate, and no more what arrives there, which a network of cards that all have
this rate holds up only where several send to one. There is only one queue here for all that would wait for a
node, and answers to what it sends itself would stand in it behind the data of others: with a limit there,
tiles with two axes, whose ranks have two neighbours to hear from, took up to 1.8 times as long in most turns,
whenever ranks had once come out of step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface

from virtual.netlink import Namespace

LINK = "eth0"  # of a node, as it sees it
SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_PORT = 29400
# BBR, which some machines prefer, takes the share that a flow has beside others for what the link can do, and
# paces it by that when the others have ended. Reno fills a link that drops nothing. What waits for the link
# waits in the sockets, or answers to other nodes would wait behind it.
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_limit_output_bytes": str(2**17),
}


@dataclass(frozen=True)
class Rank:
    """Where a rank runs."""

    rank: int
    node: int
    gpu: int  # index among those of the cluster; 0 if there are none
    crowd: int  # ranks on its GPU; 0 if it has none
    seat: int  # among the ranks of its node on its GPU


@dataclass(frozen=True)
class Cluster:
    """Ranks on nodes.

    Args:
        ranks: of all nodes together, a multiple of ``nodes``.
        nodes: virtual nodes, 1 to 250.
        rate: bytes per second that a node sends; None for as fast as the machine can.
        gpus: names of the GPUs for CUDA_VISIBLE_DEVICES; none for ranks on the CPU.
    """

    ranks: int
    nodes: int
    rate: int | None
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"--ranks is {self.ranks}; it must be at least 1")
        if not 1 <= self.nodes <= 250:
            raise ValueError(f"--nodes is {self.nodes}; a virtual cluster has 1 to 250")
        if self.ranks % self.nodes:
            raise ValueError(f"--ranks is {self.ranks}; it must be a multiple of --nodes {self.nodes}")
        if self.rate is not None and self.rate < 10**6:
            raise ValueError(f"--rate is {self.rate / 1e6:g} MB/s; it must be at least 1")

    def place(self, rank: int) -> Rank:
        """Where a rank runs."""
        each = self.ranks // self.nodes
        if not self.gpus:
            return Rank(rank, rank // each, 0, 0, rank % each)
        on = rank % len(self.gpus)
        crowd = len(range(on, self.ranks, len(self.gpus)))
        first = rank // each * each
        seat = sum(1 for other in range(first, rank) if other % len(self.gpus) == on)
        return Rank(rank, rank // each, on, crowd, seat)

    @property
    def crowd(self) -> int:
        """Ranks on the fullest GPU; 0 without GPUs."""
        return -(-self.ranks // len(self.gpus)) if self.gpus else 0

    def address(self, node: int) -> IPv4Interface:
        return IPv4Interface(f"10.77.{node}.2/30")

    def gateway(self, node: int) -> IPv4Interface:
        return IPv4Interface(f"10.77.{node}.1/30")

    def describe(self) -> str:
        rate = "unshaped" if self.rate is None else f"{self.rate / 1e6:g} MB/s each"
        gpus = f", {self.crowd} ranks a GPU" if self.gpus else ", on the CPU"
        nodes = f"{self.nodes} node{'' if self.nodes == 1 else 's'}"
        return f"virtual cluster: {self.ranks} ranks on {nodes}, {rate}{gpus}"

    def environment(self, rank: int, *, isolated: bool, port: int = _PORT) -> dict[str, str]:
        """What tells a rank where it is: for torch.distributed, gloo, NCCL and CUDA.

        Args:
            isolated: whether its node has a network of its own; else all use this machine's loopback.
            port: where rank 0 serves the store.
        """
        place = self.place(rank)
        link = LINK if isolated else "lo"
        chosen = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            # Programs take the device of this number, if there are that many: for them ranks that share a
            # GPU are one.
            "LOCAL_RANK": str(place.gpu),
            "LOCAL_WORLD_SIZE": str(len(self.gpus) or 1),
            "MASTER_ADDR": str(self.address(0).ip) if isolated else "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
            "GLOO_SOCKET_IFNAME": link,
            "NCCL_SOCKET_IFNAME": link,
            "NCCL_IB_DISABLE": "1",
            # NCCL refuses two ranks of a host on one GPU: to it, each of them is a host of its own.
            "NCCL_HOSTID": f"node{place.node}.{place.seat}",
            "VIRTUAL_CLUSTER": self.describe(),
        }
        if place.crowd > 1:
            chosen[SHARED_GPU] = "1"
        return chosen


@contextmanager
def network(cluster: Cluster) -> Iterator[Sequence[Namespace]]:
    """The networks of the nodes, around a switch that is a network too. OSError if the kernel refuses."""
    with ExitStack() as stack:

        def made() -> Namespace:
            namespace = Namespace.new()
            stack.callback(namespace.close)
            return namespace

        switch = made()
        switch.set("ip_forward", "1")
        nodes = []
        for number in range(cluster.nodes):
            node, port = made(), f"node{number}"
            switch.connect(port, node, LINK)
            switch.configure(port, cluster.gateway(number), None)
            node.configure(LINK, cluster.address(number), cluster.rate)
            for name, value in _TCP.items():
                with suppress(OSError):  # a kernel without it does what it does
                    node.set(name, value)
            node.route_by(IPv4Address(cluster.gateway(number).ip))
            nodes.append(node)
        yield nodes
