"""Run a program on the ranks of a virtual cluster: nodes with slow links between them, all on this machine.

    python benchmarks/virtual_cluster.py --ranks 4 --rate 5       benchmarks/distributed.py on four nodes
    python benchmarks/virtual_cluster.py --ranks 16 --rate 250 -- benchmarks/distributed.py --seq-len 8192 \\
        --heads 16 --dtype bfloat16 --no-bare --kernel triton
    python benchmarks/virtual_cluster.py --ranks 8 --nodes 4 -- launch/train.py --tile 2x4

What stands behind `--` runs on every rank, as under torchrun. Every node has a network and a host name of
its own, and sends --rate megabytes a second at most. With GPUs the ranks share them through NVIDIA's MPS;
NCCL talks over sockets, copy engines work inside a node. Kernels whose blocks wait for each other (hopper,
triton-dash) need multiprocessors of their own: four ranks a GPU have them, with more take --kernel triton.
Without GPUs ranks run on the CPU with gloo. Needs Linux and root (or `unshare -Urn` in front); --no-network
does without, on the loopback device and at its speed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

from virtual.mps import NoMps, multi_process_service
from virtual.netlink import CLONE_NEWUTS, Namespace, call
from virtual.undertaker import undertaker
from virtual.virtual_nodes import Cluster, network

HERE = Path(__file__).resolve().parent
KERNEL_OF_SHARED_GPUS = "triton"
_SET_DEATH_SIGNAL = 1
_SHOWN = 2  # ranks whose last words are shown when all are past their time
_LINES = 30
_GRACE = 5.0  # seconds that ranks have to end, once one has failed and once asked


class CannotRun(RuntimeError):
    """This machine lacks something; the message says what, and what works without it."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        gpus = () if options.device == "cpu" else find_gpus()
        if options.device == "cuda" and not gpus:
            raise CannotRun("--device cuda: nvidia-smi finds no GPU here; --device cpu uses gloo")
        nodes = options.nodes or options.ranks
        rate = None if options.rate is None else round(options.rate * 1e6)
        return run(Cluster(options.ranks, nodes, rate, gpus), options)
    except (CannotRun, ValueError) as error:
        print(f"virtual_cluster.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("virtual_cluster.py: interrupted; all ranks have been ended", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, help="default: one a rank")
    parser.add_argument("--rate", type=float, help="MB/s that a node sends (default: no limit)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--no-network", action="store_true", help="loopback in place of nodes with links")
    parser.add_argument("--no-mps", action="store_true", help="let ranks take turns on a GPU: 1 ms a rank")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which all is ended")
    parser.add_argument("program", nargs="*", help="and its options, behind --")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; options of the program stand behind --")
    if options.rate is not None and not math.isfinite(options.rate):
        parser.error(f"--rate is {options.rate:g}; it must be a number of MB/s")
    if not options.timeout > 0:
        parser.error(f"--timeout is {options.timeout:g}; it must be positive")
    options.program = options.program or [str(HERE / "distributed.py"), "--no-bare"]
    if options.no_network and (options.rate is not None or options.nodes not in (None, 1)):
        parser.error("--no-network has one node and no --rate")
    if options.no_network:
        options.nodes = 1
    return options


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """For signals that are to end this program as ^C does."""
    raise KeyboardInterrupt


def find_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves in sight."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(listed: str, chosen: str | None) -> tuple[str, ...]:
    """UUIDs from lines "index, uuid", in the order of CUDA_VISIBLE_DEVICES if that is set."""
    uuids = {}
    for line in listed.strip().splitlines():
        index, uuid = (part.strip() for part in line.split(","))
        uuids[index] = uuids[uuid] = uuid
    if chosen is None:
        return tuple(dict.fromkeys(uuids.values()))
    return tuple(uuids[name.strip()] for name in chosen.split(",") if name.strip() in uuids)


def run(cluster: Cluster, options: argparse.Namespace) -> int:
    """Start the program on all ranks and wait; the code of the first rank that failed, 124 past the time."""
    with ExitStack() as stack:
        # Sockets of MPS need a short path.
        folder = Path(tempfile.mkdtemp(prefix="vc", dir="/tmp"))
        shared = stack.enter_context(undertaker(folder))
        if cluster.crowd > 1 and not options.no_mps:
            try:
                shared |= stack.enter_context(
                    multi_process_service(cluster.gpus, folder, end_with_parent(os.getpid()))
                )
            except NoMps as error:
                raise CannotRun(f"{error}; --no-mps does without, and slowly") from error
        nodes: Sequence[Namespace] | None = None
        if not options.no_network:
            try:
                nodes = stack.enter_context(network(cluster))
            except (OSError, AttributeError) as error:  # without Linux there is no unshare
                raise CannotRun(
                    f"networks of virtual nodes cannot be made ({error}): that needs Linux and root, or "
                    "`unshare -Urn` in front of the command; --no-network uses loopback at its own speed"
                ) from error
        print(cluster.describe(), flush=True)
        crew = stack.enter_context(Crew(folder))
        port = 29400 if nodes is not None else _free_port()
        for rank in range(cluster.ranks):
            place = cluster.place(rank)
            environment = {
                "PYTHONFAULTHANDLER": "1",  # so that a rank that is ended for its time says where it was
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that nobody knows the names of virtual nodes
                "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // cluster.ranks)),
                **os.environ,
                **shared,
                **cluster.environment(rank, isolated=nodes is not None, port=port),
            }
            enter = enter_node(os.getpid(), None if nodes is None else nodes[place.node], place.node)
            crew.start([sys.executable, *options.program], environment, enter)
        return crew.wait(options.timeout)


def _free_port() -> int:
    """One that nobody serves now, and not of those that the kernel gives away by itself: until rank 0 serves
    it, some seconds pass, in which it would come to somebody else on a busy machine."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = random.randrange(20000, 32768)
            probe.bind(("127.0.0.1", port))
            return port


def end_with_parent(parent: int) -> Callable[[], None]:
    """What a new process does first so that it does not outlive this one, however this one ends."""

    def enter() -> None:
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return enter


def enter_node(parent: int, network: Namespace | None, number: int) -> Callable[[], None]:
    """What a rank does first: move into its node."""
    bound = end_with_parent(parent)

    def enter() -> None:
        bound()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one that is ended would write all of its memory
        if network is not None:
            network.enter()
            call("unshare", CLONE_NEWUTS)
            socket.sethostname(f"node{number}")

    return enter


class Crew:
    """The processes of all ranks. Rank 0 speaks; of another that fails the last lines are shown."""

    def __init__(self, folder: Path, grace: float = _GRACE) -> None:
        self._folder = folder
        self._grace = grace
        self._ranks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.txt"

    def start(self, command: Sequence[str], environment: dict[str, str], enter: Callable[[], None]) -> None:
        rank = len(self._ranks)
        log = None if rank == 0 else self._log(rank).open("wb")
        try:
            self._ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=enter,
                )
            )
        finally:
            if log is not None:
                log.close()

    def wait(self, timeout: float) -> int:
        """0 once all have ended well; else the code of the first that has not, and the others are ended."""
        deadline = time.monotonic() + timeout
        while True:
            codes = [rank.poll() for rank in self._ranks]
            failed = next((rank for rank, code in enumerate(codes) if code), None)
            if failed is not None:
                self._let_speak()
                self._show(failed)
                code = codes[failed] or 1
                return code if code > 0 else 128 - code
            if all(code == 0 for code in codes):
                return 0
            if time.monotonic() > deadline:
                running = [rank for rank, code in enumerate(codes) if code is None]
                print(
                    f"virtual_cluster.py: error: ranks {running} have not ended after {timeout:g} s",
                    file=sys.stderr,
                )
                for rank in running:
                    os.kill(self._ranks[rank].pid, signal.SIGABRT)
                self._let_speak()
                for rank in running[-_SHOWN:]:
                    self._show(rank)
                return 124
            time.sleep(0.1)

    def _let_speak(self) -> None:
        """Others may be about to say why they fail."""
        deadline = time.monotonic() + self._grace
        while time.monotonic() < deadline and any(rank.poll() is None for rank in self._ranks):
            time.sleep(0.1)

    def _show(self, rank: int) -> None:
        code = self._ranks[rank].poll()
        state = "still runs" if code is None else f"ended with code {code}"
        print(f"virtual_cluster.py: rank {rank} {state}", file=sys.stderr)
        if rank > 0:
            lines = self._log(rank).read_text(errors="replace").splitlines()[-_LINES:]
            print("\n".join(f"  rank {rank}: {line}" for line in lines), file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the ranks that still run, and whatever any rank has started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in self._ranks:
                with contextlib.suppress(ProcessLookupError):  # nobody of its group is left
                    os.killpg(rank.pid, number)
            deadline = time.monotonic() + self._grace
            while time.monotonic() < deadline and any(rank.poll() is None for rank in self._ranks):
                time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
