"""The virtual cluster: who runs where, and ring and mesh tiles on it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import virtual_cluster
from networks import networks_can_be_made
from virtual.virtual_nodes import SHARED_GPU, Cluster

SCRIPT = Path(virtual_cluster.__file__)


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
        (0, 0, None, "--ranks is 0"),
        (4, 0, None, "--nodes is 0"),
        (4, 4, 10, "--rate is 1e-05 MB/s; it must be at least 1"),
    ],
)
def test_clusters_that_cannot_be_are_refused(ranks: int, nodes: int, rate: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(ranks, nodes, rate)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--ranks 2 launch/train.py --steps 2", "--steps 2; options of the program stand behind --"),
        ("--timeout -1", "--timeout is -1; it must be positive"),
        ("--timeout nan", "--timeout is nan"),
        ("--rate inf", "--rate is inf; it must be a number of MB/s"),
        ("--no-network --rate 4", "--no-network has one node and no --rate"),
    ],
    ids=lambda given: given.split()[0],
)
def test_wrong_options_are_refused_with_the_way_out(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        virtual_cluster.main(given.split())
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_gpus_in_sight_are_named_by_uuid_in_the_order_asked_for() -> None:
    listed = "0, GPU-a\n1, GPU-b\n2, GPU-c\n"
    assert virtual_cluster.visible(listed, None) == ("GPU-a", "GPU-b", "GPU-c")
    assert virtual_cluster.visible(listed, "2,0") == ("GPU-c", "GPU-a")
    assert virtual_cluster.visible(listed, "GPU-b") == ("GPU-b",)
    assert virtual_cluster.visible(listed, "") == ()


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
