"""The virtual cluster: who runs where, what the kernel is told, and that nothing outlives it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import struct
import subprocess
import sys
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

import pytest

import virtual_cluster
from virtual import mps, netlink, undertaker
from virtual.virtual_nodes import SHARED_GPU, Cluster, network
from waiting import eventually

SCRIPT = Path(virtual_cluster.__file__)


def networks_can_be_made() -> bool:
    try:
        with network(Cluster(1, 1, 10**7)):
            return True
    except OSError:
        return False


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


CLUSTERS = [
    Cluster(ranks, nodes, None, tuple(f"GPU-{n}" for n in range(gpus)))
    for ranks, nodes, gpus in [
        (4, 4, 1),
        (16, 16, 1),
        (16, 8, 2),
        (6, 3, 2),
        (12, 2, 3),
        (5, 1, 2),
        (1, 1, 1),
    ]
]
of_clusters = pytest.mark.parametrize(
    "cluster", CLUSTERS, ids=lambda x: f"P{x.ranks}-N{x.nodes}-G{len(x.gpus)}"
)


@of_clusters
def test_ranks_fill_nodes_in_order_and_gpus_evenly(cluster: Cluster) -> None:
    places = [cluster.place(rank) for rank in range(cluster.ranks)]
    assert [place.node for place in places] == sorted(place.node for place in places)
    each = {node: [p for p in places if p.node == node] for node in range(cluster.nodes)}
    assert {len(ranks) for ranks in each.values()} == {cluster.ranks // cluster.nodes}
    on = {gpu: [place for place in places if place.gpu == gpu] for gpu in range(len(cluster.gpus))}
    assert all(place.crowd == len(ranks) for ranks in on.values() for place in ranks)
    assert max(map(len, on.values())) - min(map(len, on.values())) <= 1
    assert cluster.crowd == max(map(len, on.values()))


@of_clusters
def test_nccl_sees_one_host_where_ranks_of_a_node_have_different_gpus_and_only_there(
    cluster: Cluster,
) -> None:
    for one, other in itertools.combinations(range(cluster.ranks), 2):
        a, b = cluster.place(one), cluster.place(other)
        hosts = {cluster.environment(rank, isolated=True)["NCCL_HOSTID"] for rank in (one, other)}
        if a.node != b.node or a.gpu == b.gpu:
            assert len(hosts) == 2
        elif a.seat == b.seat:
            assert len(hosts) == 1


@of_clusters
def test_every_rank_is_told_where_it_is(cluster: Cluster) -> None:
    told = [cluster.environment(rank, isolated=True) for rank in range(cluster.ranks)]
    assert [int(one["RANK"]) for one in told] == list(range(cluster.ranks))
    assert {one["MASTER_ADDR"] for one in told} == {str(cluster.address(cluster.place(0).node).ip)}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in told} == {",".join(cluster.gpus)}
    assert [int(one["LOCAL_RANK"]) for one in told] == [cluster.place(r).gpu for r in range(cluster.ranks)]
    assert all(int(one["LOCAL_RANK"]) < int(one["LOCAL_WORLD_SIZE"]) for one in told)
    assert all((one.get(SHARED_GPU) == "1") == (cluster.crowd > 1) for one in told)
    loopback = cluster.environment(0, isolated=False, port=5)
    assert (loopback["MASTER_ADDR"], loopback["NCCL_SOCKET_IFNAME"], loopback["MASTER_PORT"]) == (
        "127.0.0.1",
        "lo",
        "5",
    )


def test_every_end_of_every_link_has_an_address_of_its_own_and_both_ends_a_network() -> None:
    cluster = Cluster(250, 250, None)
    ends = [end for node in range(250) for end in (cluster.address(node), cluster.gateway(node))]
    assert len({end.ip for end in ends}) == 500
    assert all(cluster.address(node).network == cluster.gateway(node).network for node in range(250))


def test_without_gpus_none_is_in_sight() -> None:
    told = Cluster(3, 3, 10**7).environment(2, isolated=True)
    assert (told["CUDA_VISIBLE_DEVICES"], SHARED_GPU in told) == ("", False)
    assert told["VIRTUAL_CLUSTER"] == "virtual cluster: 3 ranks on 3 nodes, 10 MB/s each, on the CPU"


@pytest.mark.parametrize(
    ("ranks", "nodes", "rate", "message"),
    [
        (6, 4, None, "--ranks is 6; it must be a multiple of --nodes 4"),
        (0, 1, None, "--ranks is 0"),
        (4, 0, None, "--nodes is 0"),
        (4, 4, 10, "--rate is 1e-05 MB/s; it must be at least 1"),
    ],
)
def test_clusters_that_cannot_be_are_refused(ranks: int, nodes: int, rate: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(ranks, nodes, rate)


def test_gpus_in_sight_are_named_by_uuid_in_the_order_asked_for() -> None:
    listed = "0, GPU-a\n1, GPU-b\n2, GPU-c\n"
    assert virtual_cluster.visible(listed, None) == ("GPU-a", "GPU-b", "GPU-c")
    assert virtual_cluster.visible(listed, "2,0") == ("GPU-c", "GPU-a")
    assert virtual_cluster.visible(listed, "GPU-b") == ("GPU-b",)
    assert virtual_cluster.visible(listed, "") == ()


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


@pytest.mark.slow
@pytest.mark.parametrize("network", [["--rate", "20"], ["--no-network"]], ids=["nodes", "loopback"])
def test_ring_and_mesh_are_checked_and_timed_on_four_ranks(network: list[str], tmp_path: Path) -> None:
    if "--rate" in network and not networks_can_be_made():
        pytest.skip("making networks is not permitted here")
    program = [str(SCRIPT.with_name("distributed.py")), "--seq-len", "300", "--kv-heads", "2", "--no-bare"]
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "4", *network, "--", *program]
    done = subprocess.run(
        [
            *command,
            "--tile",
            "2x2",
            "2x1x2",
            "--transport",
            "p2p",
            "plain",
            "--rounds",
            "1",
            "--out",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*distributed-4-ranks-virtual.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    sent = {record["case"]: record for record in records if record["metric"] == "backward bytes"}
    assert len(sent) == 6 and all(record["ratio"] == 1.0 for record in sent.values())
    assert all("virtual cluster: 4 ranks" in record["device"] for record in records)


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


def crew(tmp_path: Path, *programs: str) -> virtual_cluster.Crew:
    made = virtual_cluster.Crew(tmp_path, grace=0.3)
    for program in programs:
        made.start([sys.executable, "-c", program], dict(os.environ), lambda: None)
    return made


SLEEP = "import time; time.sleep(600)"


def test_the_code_of_the_rank_that_fails_is_given_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with crew(tmp_path, SLEEP, "raise SystemExit('no more')") as ranks:
        assert ranks.wait(60) == 1
        pids = [rank.pid for rank in ranks._ranks]
    assert all(is_gone(pid) for pid in pids)
    said = capsys.readouterr().err
    assert "rank 1 ended with code 1" in said and "rank 1: no more" in said


def test_a_signal_is_a_failure_and_all_well_is_none(tmp_path: Path) -> None:
    with crew(tmp_path, SLEEP, "import os; os.kill(os.getpid(), 9)") as ranks:
        assert ranks.wait(60) == 128 + 9
    with crew(tmp_path, "pass", "pass") as ranks:
        assert ranks.wait(60) == 0


def test_past_the_time_all_is_ended_even_what_ranks_have_started_and_will_not_hear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = tmp_path / "pid"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}]); {deaf}"
    parent = parent.replace("subprocess.Popen(", f"open({str(note)!r}, 'w').write(str(subprocess.Popen(")
    parent = parent.replace(f"{deaf!r}])", f"{deaf!r}]).pid))", 1)
    with crew(tmp_path, "pass", parent) as ranks:
        assert eventually(lambda: note.exists() and note.read_text() != "", 20)
        assert ranks.wait(0.3) == 124
    assert "ranks [1] have not ended after 0.3 s" in capsys.readouterr().err
    assert eventually(lambda: is_gone(int(note.read_text())), 20)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)], ids=str
)
def test_nothing_outlives_the_cluster(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Ranks, a process of a session of its own that a rank has started and that will not hear, the folder."""
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
    rank = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {deaf!r}], start_new_session=True)
note = os.environ["NOTES"] + os.environ["RANK"]
with open(note + ".new", "w") as file:
    print(os.getpid(), child.pid, os.environ["{undertaker.FOLDER}"], file=file)
os.rename(note + ".new", note)
{SLEEP}
"""
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--ranks", "2", "--no-network", "--", "-c"]
    notes = [tmp_path / "note0", tmp_path / "note1"]
    cluster = subprocess.Popen(
        [*command, rank],
        env={**os.environ, "NOTES": str(tmp_path / "note")},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert eventually(lambda: all(path.exists() for path in notes), 20)
    cluster.send_signal(number)
    cluster.communicate(timeout=30)
    assert cluster.returncode == code
    for note in notes:
        *pids, folder = note.read_text().split()
        assert all(eventually(lambda pid=pid: is_gone(int(pid)), 20) for pid in pids)
        assert eventually(lambda folder=folder: not Path(folder).exists(), 20)


FAKE_MPS = """#!/bin/bash
pipe=$CUDA_MPS_PIPE_DIRECTORY
if [ "$1" = -f ]; then
    echo "$CUDA_VISIBLE_DEVICES" > $pipe/up
    until [ -e $pipe/quit ] && [ -z "$DEAF" ]; do sleep 0.05; done
    exit
fi
read command
[ -e $pipe/up ] || exit 1
[ $command = quit ] && touch $pipe/quit
exit 0
"""


@pytest.fixture
def fake_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / mps.PROGRAM
    program.parent.mkdir()
    program.write_text(FAKE_MPS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(mps, "_PATIENCE", 3.0)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("deaf", ["", "1"], ids=["obedient", "deaf"])
def test_mps_is_up_inside_and_gone_afterwards(
    deaf: str, fake_mps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEAF", deaf)
    started = []
    popen = subprocess.Popen

    def noted(*arguments: object, **options: object) -> object:
        started.append(popen(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(mps.subprocess, "Popen", noted)
    with pytest.raises(KeyboardInterrupt), mps.multi_process_service(["GPU-a", "GPU-b"], fake_mps) as told:
        up = Path(told["CUDA_MPS_PIPE_DIRECTORY"]) / "up"
        assert up.read_text().strip() == "GPU-a,GPU-b"
        raise KeyboardInterrupt
    assert started[0].returncode == (-9 if deaf else 0)


def test_where_there_is_no_mps_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mps.NoMps, match="is not on this machine"), mps.multi_process_service([], tmp_path):
        pass
