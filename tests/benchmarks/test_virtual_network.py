"""Networks of virtual nodes: what the kernel is told, and that nodes reach each other."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import pytest

import virtual_cluster
from networks import networks_can_be_made
from virtual import netlink

SCRIPT = Path(virtual_cluster.__file__)


def attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while data:
        length, kind = struct.unpack_from("=HH", data)
        found[kind] = data[4:length]
        data = data[-(-length // 4) * 4 :]
    return found


@pytest.mark.parametrize("rate", [10**6, 250 * 10**6, 2**32 - 1, 2**32, 10**11])
def test_a_rate_reaches_the_kernel_whole(rate: int) -> None:
    body = attributes(netlink.token_bucket(7, rate)[20:])
    options = attributes(body[2])
    assert body[1] == b"tbf\0"
    small = int.from_bytes(options[1][8:12], sys.byteorder)
    assert (int.from_bytes(options[4], sys.byteorder) if 4 in options else small) == rate
    assert small == min(rate, 2**32 - 1)
    burst = int.from_bytes(options[6], sys.byteorder)
    assert burst >= 2**16 + 2**14  # a packet of 64 KiB with its headers passes


def test_messages_carry_names_and_addresses() -> None:
    made = attributes(netlink.veth("left", "right", 9)[16:])
    peer = attributes(attributes(attributes(made[18])[2])[1][16:])
    assert (made[3], peer[3], struct.unpack("=i", peer[28])) == (b"left\0", b"right\0", (9,))
    assert attributes(netlink.address(3, IPv4Interface("10.1.2.3/30"))[8:])[2] == bytes([10, 1, 2, 3])
    assert attributes(netlink.default_route(IPv4Address("10.1.2.1"))[12:])[5] == bytes([10, 1, 2, 1])


MEET = """
import os, socket
rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 9)
if rank == 0:
    with socket.create_server(address) as server:
        met = []
        for _ in range(2):
            peer, (where, _) = server.accept()
            met.append((where, peer.recv(99).decode()))
    print(socket.gethostname(), sorted(met))
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except ConnectionRefusedError:
            pass
    peer.sendall(socket.gethostname().encode())
"""


def test_nodes_have_networks_and_names_of_their_own_and_reach_each_other() -> None:
    if not networks_can_be_made():
        pytest.skip("making networks is not permitted here")
    command = [
        sys.executable,
        str(SCRIPT),
        "--device",
        "cpu",
        "--ranks",
        "3",
        "--rate",
        "50",
        "--",
        "-c",
        MEET,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "node0 [('10.77.1.2', 'node1'), ('10.77.2.2', 'node2')]"


def test_without_the_right_to_make_networks_it_says_what_is_missing_and_what_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, *arguments: int) -> None:
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(netlink, "call", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert virtual_cluster.main(["--device", "cpu", "--rate", "5"]) == 2
    said = capsys.readouterr().err
    assert "unshare: Operation not permitted" in said
    assert "root" in said and "unshare -Urn" in said and "--no-network" in said
