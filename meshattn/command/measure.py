"""A topology measured on the ranks that there are, by the library's own transports and kernels.

    torchrun --nproc-per-node 8 -m meshattn calibrate --out cluster.json

All ranks exchange at once, first with a neighbour on their host, then with one on another, and all compute at
once: what ranks share, a network card or a GPU, is in the figures.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import platform
import socket
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from meshattn import __version__
from meshattn.command.blocks import Block, BlockSize, workspace_of
from meshattn.command.clock import Clock
from meshattn.command.progress import Progress
from meshattn.mesh import AttentionMesh
from meshattn.mesh_building import init_attention_mesh
from meshattn.plan.kernel_times import MOST_WORK, BlockPass, BlockTime, KernelTimes, Origin
from meshattn.plan.prediction import size_of
from meshattn.plan.topology import Link, Topology
from meshattn.transport.base import Message, Transport
from meshattn_kernels import AttentionKernel, choose_kernel, get_kernel

KINDS: dict[BlockPass, str] = {
    "forward": "forward", "merging": "forward", "backward": "backward", "adding": "backward"
}  # fmt: skip
"""Passes that take the host as long to queue."""
MOST_WORK_OF_CPU = 2**33
"""As `MOST_WORK`, which is that of a GPU."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Sizes:
    """What is measured: messages of a small and a large size, blocks of all these rows and heads."""

    rows: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    """Query heads, and key/value heads."""
    head_dim: int
    dtype: str = "fp32"
    """Of q, k and v: a name of `ITEMSIZES`."""
    messages: tuple[int, int] = (2**16, 2**24)
    more: tuple[tuple[int, int, int], ...] = ()
    """Blocks by rows, query heads and key/value heads, beside all of ``rows`` with all of ``heads``."""

    @property
    def blocks(self) -> list[BlockSize]:
        """In the order in which they are measured."""
        crossed = [(rows, *heads) for rows in self.rows for heads in self.heads]
        return [
            BlockSize(rows, heads, kv_heads, self.head_dim, DTYPES[self.dtype], causal)
            for rows, heads, kv_heads in dict.fromkeys([*crossed, *self.more])
            for causal in (True, False)
        ]


def join() -> torch.device:
    """Start the process group that torchrun has prepared, and take this rank's device; ValueError without
    torchrun."""
    if "RANK" not in os.environ:
        raise ValueError(
            "calibrate measures ranks that torchrun starts: "
            "torchrun --nproc-per-node N -m meshattn calibrate --out FILE"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group("nccl")
        return torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo")
    return torch.device("cpu")


@contextlib.contextmanager
def leaving(leave: Callable[[], object], device: torch.device) -> Iterator[None]:
    """Leave what ranks share, at the end. After an error on GPUs it is left alone: there it takes the other
    ranks, which may not come, and nobody could read the error meanwhile."""
    try:
        yield
    except BaseException:
        if device.type == "cpu":
            leave()
        raise
    leave()


def calibrate(
    sizes: Sizes,
    device: torch.device,
    *,
    name: str = "measured",
    per_node: int | None = None,
    transport: str = "auto",
    kernel: str | None = None,
) -> Topology:
    """Measure the ranks of the default group, which must be numbered host by host. Collective; the same
    topology on every rank. ``per_node`` is for hosts that are parts of one machine; ``transport`` is that of
    `init_attention_mesh` and ``kernel`` that of `mesh_attention`.

    Raises ValueError, on every rank alike, if hosts have different numbers of ranks or ranks are not numbered
    host by host, for a kernel that does not serve the type or the head size here, and for blocks and messages
    that do not fit into the memory of a rank or would take too long.
    """
    chosen = choose_kernel(kernel, device, DTYPES[sizes.dtype], sizes.head_dim, sizes.head_dim)
    mesh = init_attention_mesh(tile=(1, dist.get_world_size()), transport=transport)
    with leaving(mesh.close, device):
        if per_node is None:
            per_node = _ranks_per_host(mesh, device)
        if per_node < 1 or mesh.size % per_node:
            raise ValueError(f"{per_node} ranks a node do not divide the {mesh.size} ranks")
        _check_sizes(mesh, sizes, device, get_kernel(chosen))
        topology = _measure(mesh, sizes, device, name, per_node, get_kernel(chosen))
    return topology


def _check_sizes(mesh: AttentionMesh, sizes: Sizes, device: torch.device, kernel: AttentionKernel) -> None:
    """Before anything is measured."""
    gpu = device.type == "cuda"
    longest = max(sizes.blocks, key=lambda block: block.rows**2 * block.heads)
    most = math.isqrt((MOST_WORK if gpu else MOST_WORK_OF_CPU) // longest.heads)
    if longest.rows > most:
        raise ValueError(
            f"a block of {longest.rows} rows and {longest.heads} heads (--rows with --heads, or --block) "
            f"would take a {'GPU' if gpu else 'CPU'} long: with as many heads give at most {most} rows"
        )
    if gpu:
        own = torch.cuda.get_device_properties(device).total_memory
    else:
        own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    have = int(min(_all(mesh, own, device)))
    largest = max(sizes.blocks, key=lambda block: block.num_bytes(kernel))
    tensors = f"the tensors of {largest.rows} rows and {largest.heads} heads"
    for what, need, options in (
        (tensors, largest.num_bytes(kernel), "--rows, --heads or --block"),
        ("messages", 2 * sizes.messages[1], "--messages"),
    ):
        if need > have:
            raise ValueError(
                f"{what} take {size_of(need)}, but there is a rank with {size_of(have)}: give less for "
                f"{options}"
            )


def _measure(
    mesh: AttentionMesh,
    sizes: Sizes,
    device: torch.device,
    name: str,
    per_node: int,
    kernel: AttentionKernel,
) -> Topology:
    clock = Clock(device, partial(_agreed, mesh, device=device))
    say = Progress("calibrate") if mesh.rank == 0 else None
    ranks = range(mesh.size)
    near = tuple(r // per_node * per_node + (r + 1) % per_node for r in ranks)
    far = tuple((r + per_node) % mesh.size for r in ranks)
    links = [
        _link(clock, mesh, ring, sizes.messages) if any(peer != r for r, peer in enumerate(ring)) else None
        for ring in (near, far)
    ]
    unused = Link(gb_per_s=1e6)  # a node of one rank has no link inside
    blocks = []
    for number, size in enumerate(sizes.blocks, 1):
        if say is not None:
            say(f"block {number} of {len(sizes.blocks)}, {size}")
        blocks.append(_block_time(clock, mesh, kernel, size))
    return Topology(
        name=name,
        gpus_per_node=per_node,
        inside=links[0] or unused,
        between=links[1],
        kernels=KernelTimes(kernel.name, tuple(blocks), sizes.dtype, _origin(device)),
        memory_gb_per_s=_memory(clock),
        start_us=round(clock.start_us(), 2),
    )


def _origin(device: torch.device) -> Origin:
    gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if gpu else f"CPU {platform.machine()}"
    packages = {"meshattn": __version__, "torch": torch.__version__}
    with contextlib.suppress(PackageNotFoundError):
        packages["triton"] = version("triton")
    found = ", ".join(f"{name} {number}" for name, number in packages.items())
    return Origin(name, found, str(datetime.date.today()))


def _agreed(mesh: AttentionMesh, value: float, device: torch.device) -> float:
    """The median over the ranks."""
    return statistics.median(_all(mesh, value, device))


def _all(mesh: AttentionMesh, value: float, device: torch.device) -> list[float]:
    """By rank."""
    own = torch.tensor([value], dtype=torch.float64, device=device)
    return [float(each) for each in mesh.connection.transport.all_gather(own)]


def _ranks_per_host(mesh: AttentionMesh, device: torch.device) -> int:
    named = zlib.crc32(f"{socket.gethostname()} {platform.node()}".encode())
    own = torch.tensor([named], dtype=torch.int64, device=device)
    hosts = [int(each) for each in mesh.connection.transport.all_gather(own)]
    counts = set(Counter(hosts).values())
    per_host = hosts.count(hosts[0])
    runs = [hosts[n : n + per_host] for n in range(0, len(hosts), per_host)]
    if len(counts) > 1 or any(len(set(run)) > 1 for run in runs):
        raise ValueError(
            f"ranks by host are {[hosts.index(host) for host in hosts]}: start equally many on every host, "
            "numbered host by host"
        )
    return per_host


def _link(clock: Clock, mesh: AttentionMesh, ring: tuple[int, ...], sizes: tuple[int, int]) -> Link:
    """By the time of a small and of a large message, sent by all ranks at once along a ring."""
    transport = mesh.connection.along(ring, clock.device)
    small, large = (_exchange_us(clock, mesh, transport, ring, size) for size in sizes)
    us_per_byte = max((large - small) / (sizes[1] - sizes[0]), 1e-9)
    return Link(
        gb_per_s=float(f"{1e-3 / us_per_byte:.4g}"),
        latency_us=round(max(small - sizes[0] * us_per_byte, 0.0), 2),
        sm_share=round(_share(transport, clock.device), 4),
        copy_engines=transport.name == "symmetric",
    )


def _share(transport: Transport, device: torch.device) -> float:
    if device.type != "cuda" or not transport.multiprocessors:
        return 0.0
    return transport.multiprocessors / torch.cuda.get_device_properties(device).multi_processor_count


def _exchange_us(
    clock: Clock, mesh: AttentionMesh, transport: Transport, ring: tuple[int, ...], num_bytes: int
) -> float:
    (recv,) = transport.buffers("col", "inward", num_bytes, 1, clock.device)
    send = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    message = Message(
        phase="forward",
        axis="col",
        flow="inward",
        label=f"calibration with {num_bytes} bytes",
        to=ring.index(mesh.rank),
        source=ring[mesh.rank],
    )

    def exchange() -> None:
        handle = transport.start(message, [send], [recv])
        handle.wait()
        handle.release()

    exchange()
    return clock.us(exchange, "exchange")


def _block_time(clock: Clock, mesh: AttentionMesh, kernel: AttentionKernel, size: BlockSize) -> BlockTime:
    block = _fitting(mesh, kernel, size, clock.device)
    spent = {what: round(clock.us(run, KINDS[what]), 2) for what, run in block.passes.items()}
    return BlockTime(
        head_dim=size.head_dim,
        heads=size.heads,
        kv_heads=size.kv_heads,
        rows=size.rows,
        causal=size.causal,
        forward=spent["forward"],
        merging=spent["merging"],
        backward=spent["backward"],
        adding=spent["adding"],
        workspace=workspace_of(block.passes["backward"], clock.device),
    )


def _fitting(mesh: AttentionMesh, kernel: AttentionKernel, size: BlockSize, device: torch.device) -> Block:
    """The block, every pass of which has run; ValueError on all ranks if one has not the memory for that."""
    block: Block | None
    try:
        block = Block(kernel, size, device)
        for run in block.passes.values():
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        block = None
    lacking = _all(mesh, float(block is None), device)
    if any(lacking):
        raise ValueError(
            f"a block of {size}, does not fit into the memory of rank {lacking.index(1.0)}, with what kernel "
            f"{kernel.name} keeps for itself and what other ranks have there: give fewer rows or heads by "
            "--rows, --heads or --block"
        )
    assert block is not None
    return block


def _memory(clock: Clock) -> float:
    """Gigabytes a second of an addition: two reads and a write."""
    numbers = 2**24 if clock.device.type == "cuda" else 2**20
    a, b = (torch.zeros(numbers, device=clock.device) for _ in range(2))

    def add() -> None:
        a.add_(b)

    add()
    return round(3 * 4e-3 * numbers / clock.us(add, "addition"), 1)


def sizes_of(
    device: torch.device,
    rows: Sequence[int],
    heads: Sequence[tuple[int, int]],
    head_dim: int,
    dtype: str | None = None,
    messages: Sequence[int] | None = None,
    more: Sequence[tuple[int, int, int]] = (),
) -> Sizes:
    """What was asked for, else what the device can do in some seconds."""
    gpu = device.type == "cuda"
    default: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384) if gpu else (64, 128, 256, 512)
    small, large = messages or ((2**16, 2**26) if gpu else (2**14, 2**21))
    dtype = dtype or ("bf16" if gpu else "fp32")
    if more and not rows:
        default = ()
    return Sizes(tuple(rows) or default, tuple(heads), head_dim, dtype, (small, large), tuple(more))
