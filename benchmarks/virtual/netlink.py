"""Network namespaces, links between them and their rates, asked of the kernel itself.

`ip` and `tc` do the same, but machines with GPUs often lack one of them or both. Everything made here is
anonymous: it lives as long as a file descriptor or a process uses it, so nothing is left behind by a crash.
Linux only; the right to configure networks is needed (root, or a user namespace: ``unshare -Urn``).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface

CLONE_NEWNET = 0x40000000
CLONE_NEWUTS = 0x04000000
_MTU = 9000  # as networks of clusters have: headers take less than one per cent
_BURST_MS = 4  # what a link passes at once, in time: timers are too coarse for less
_QUEUE = 2**24  # bytes that wait for a link before it drops what comes

_REQUEST, _ACK, _EXCLUSIVE, _CREATE = 1, 4, 0x200, 0x400
_NEW_LINK, _NEW_ADDRESS, _NEW_ROUTE, _NEW_QDISC = 16, 20, 24, 36
_UP = 1
_ROOT_QDISC = 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int) -> None:
    """A function of libc that answers 0; OSError if it answers anything else."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute: length, kind, value, padded to four bytes."""
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def text(value: str) -> bytes:
    return value.encode() + b"\0"


def link(index: int = 0, flags: int = 0) -> bytes:
    """Head of a message about a link; flags are set, never cleared."""
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def veth(name: str, peer: str, peer_namespace: int) -> bytes:
    """A pair of links, the other end in the namespace of that file descriptor."""
    mtu = attribute(4, struct.pack("=I", _MTU))
    other = link() + attribute(3, text(peer)) + attribute(28, struct.pack("=i", peer_namespace)) + mtu
    info = attribute(1, b"veth") + attribute(2, attribute(1, other))
    return link() + attribute(3, text(name)) + mtu + attribute(18, info)


def address(index: int, interface: IPv4Interface) -> bytes:
    head = struct.pack("=BBBBi", socket.AF_INET, interface.network.prefixlen, 0, 0, index)
    return head + attribute(2, interface.packed) + attribute(1, interface.packed)


def default_route(gateway: IPv4Address) -> bytes:
    main_table, static, everywhere, unicast = 254, 4, 0, 1
    head = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, main_table, static, everywhere, unicast, 0)
    return head + attribute(5, gateway.packed)


def token_bucket(index: int, bytes_per_second: int) -> bytes:
    """What leaves a link is held to a rate."""
    ethernet = 1
    burst = max(2**17, bytes_per_second * _BURST_MS // 1000)
    slow = struct.pack("=BBHhHI", 0, ethernet, 0, 0, 0, min(bytes_per_second, 2**32 - 1))
    options = attribute(1, slow + bytes(12) + struct.pack("=III", _QUEUE + burst, 0, 0))
    if bytes_per_second >= 2**32:
        options += attribute(4, struct.pack("=Q", bytes_per_second))
    options += attribute(6, struct.pack("=I", burst))
    head = struct.pack("=BxxxiIII", socket.AF_UNSPEC, index, 0x10000, _ROOT_QDISC, 0)
    return head + attribute(1, text("tbf")) + attribute(2, options)


def _ask(kind: int, body: bytes, flags: int = 0) -> None:
    """Send one request for the current namespace; OSError with the kernel's reason if it refuses."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        head = struct.pack("=IHHII", 16 + len(body), kind, _REQUEST | _ACK | flags, 1, 0)
        kernel.send(head + body)
        (error,) = struct.unpack_from("=i", kernel.recv(65536), 16)
    if error:
        raise OSError(-error, os.strerror(-error))


@dataclass(frozen=True)
class Namespace:
    """A network of its own, kept by its file descriptor."""

    file: int

    @staticmethod
    def here() -> Namespace:
        """That of the calling thread."""
        return Namespace(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))

    @staticmethod
    def new() -> Namespace:
        """An empty one, in which only loopback is up. The calling thread stays where it is."""
        home = Namespace.here()
        call("unshare", CLONE_NEWNET)
        try:
            made = Namespace.here()
            _ask(_NEW_LINK, link(socket.if_nametoindex("lo"), _UP))
        finally:
            home.enter()
            home.close()
        return made

    def enter(self) -> None:
        """Move the calling thread here."""
        call("setns", self.file, CLONE_NEWNET)

    @contextmanager
    def entered(self) -> Iterator[None]:
        home = Namespace.here()
        self.enter()
        try:
            yield
        finally:
            home.enter()
            home.close()

    def close(self) -> None:
        os.close(self.file)

    def set(self, name: str, value: str) -> None:
        """A setting of /proc/sys/net/ipv4 of this network."""
        with self.entered(), open(f"/proc/sys/net/ipv4/{name}", "w") as file:
            file.write(value)

    def connect(self, name: str, peer: Namespace, peer_name: str) -> None:
        """A link from here to another namespace."""
        with self.entered():
            _ask(_NEW_LINK, veth(name, peer_name, peer.file), _CREATE | _EXCLUSIVE)

    def configure(self, name: str, interface: IPv4Interface, bytes_per_second: int | None) -> None:
        """Give a link its address, bring it up, and hold what leaves it to a rate, unless that is None."""
        with self.entered():
            index = socket.if_nametoindex(name)
            _ask(_NEW_ADDRESS, address(index, interface), _CREATE | _EXCLUSIVE)
            _ask(_NEW_LINK, link(index, _UP))
            if bytes_per_second is not None:
                _ask(_NEW_QDISC, token_bucket(index, bytes_per_second), _CREATE | _EXCLUSIVE)

    def route_by(self, gateway: IPv4Address) -> None:
        """Everything that is not here goes there."""
        with self.entered():
            _ask(_NEW_ROUTE, default_route(gateway), _CREATE)
