"""Where copy engines serve: what all ranks conclude from their places, and what a mesh makes of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

import meshattn as ma
from meshattn.plan.assignment import Tile
from meshattn.testing import run_ranks
from meshattn.transport.base import TransportError
from meshattn.transport.hosts import Place, Roll, nodes_of, obstacle, sharers
from meshattn.transport.symmetric import SymmetricTransport

HERE = Place("here", "boot", "gpu0", shares=False)
CUDA = torch.device("cuda", 0)


def _places(*changes: dict[str, Any]) -> list[Place]:
    return [replace(HERE, gpu=f"gpu{n}", **change) if "gpu" not in change else replace(HERE, **change)
            for n, change in enumerate(changes)]  # fmt: skip


@pytest.mark.parametrize(
    "places, nodes, fragment",
    [
        (_places({}, {}), (0, 0), ""),
        (_places({}, {"host": "there"}, {}), (0, 1, 0), ""),
        (_places({}, {"boot": "later"}, {"boot": "later"}), (0, 1, 1), ""),
        (_places({}, {"host": "there"}), (0, 1), "every rank is on a host of its own"),
        (_places({}, {"gpu": None}), (0, 0), "rank 1 had no CUDA device in use"),
        (_places({"gpu": "a"}, {"gpu": "a"}), (0, 0), "several ranks share a GPU"),
        (_places({"gpu": "a", "shares": True}, {"gpu": "a"}), (0, 0), "several ranks share a GPU"),
        (_places({"gpu": "a", "shares": True}, {"gpu": "a", "shares": True}), (0, 0), ""),
    ],
    ids=["one-host", "two-hosts", "rebooted", "apart", "no-gpu", "shared", "half-allowed", "allowed"],
)
def test_what_places_tell(places: list[Place], nodes: tuple[int, ...], fragment: str) -> None:
    assert nodes_of(places) == nodes
    found = obstacle(places)
    assert (fragment in found) if fragment else found == ""


def test_who_shares_a_gpu() -> None:
    places = _places({"gpu": "a"}, {"gpu": "b"}, {"gpu": "a", "host": "there"}, {"gpu": None}, {"gpu": None})
    assert [sharers(places, rank) for rank in range(5)] == [2, 1, 2, 1, 1]


def test_a_roll_call() -> None:
    store = HashStore()

    def on_rank(group: Any) -> list[Any]:
        roll = Roll(store, group.rank, 3, 10.0)
        said = [roll.call(f"{group.rank} in round {number}") for number in range(3)]
        return [said, roll.first("" if group.rank == 0 else f"trouble {group.rank}"), roll.first("")]

    want = [[f"{rank} in round {number}" for rank in range(3)] for number in range(3)]
    assert run_ranks(3, on_rank) == [[want, "rank 1: trouble 1", ""]] * 3


def test_a_roll_call_does_not_wait_for_ever() -> None:
    with pytest.raises(TransportError, match=r"not all ranks of the mesh answered within 0\.2 s"):
        Roll(HashStore(), 0, 2, 0.2).call("here")


def test_without_gpus_a_mesh_says_why_and_refuses_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def on_rank(_: object) -> list[str]:
        mesh = ma.init_attention_mesh(tile=(1, 2), timeout=20)
        told = [mesh.describe(), ma.init_attention_mesh(tile=(1, 2), transport="p2p", timeout=20).describe()]
        with pytest.raises(ValueError) as info:
            ma.init_attention_mesh(tile=(1, 2), transport="symmetric", timeout=20)
        seq = mesh.sequence(8)
        x = torch.ones(1, seq.rows, 2, 8)
        assert isinstance(ma.mesh_attention(x, x, x, seq), torch.Tensor)
        mesh.check()
        mesh.close()
        return [*told, str(info.value)]

    for auto, asked, refused in run_ranks(2, on_rank, "gloo"):
        why = "rank 0 had no CUDA device in use when the mesh was built"
        assert f"transport p2p (no copy engines: {why})" in auto
        assert "transport p2p (as asked for)" in asked
        assert refused == f"transport='symmetric' cannot serve this mesh: {why}"


def test_each_axis_has_its_own_transport() -> None:
    """On two hosts of two ranks the rows stay inside and the columns leave, or the other way round."""

    def on_rank(_: object) -> list[Any]:
        mesh = ma.init_attention_mesh(tile=(2, 2), timeout=20)
        engine: Any = SimpleNamespace()
        plain = mesh.connection.transport
        told = []
        for nodes in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)):
            mesh.connection = replace(
                mesh.connection,
                nodes=nodes,
                engine=engine,
                device=CUDA,
                reason="test",
                copying=SymmetricTransport(engine, plain, plain.traffic),
            )
            along = mesh.transports(Tile(2, 2), CUDA)
            assert mesh.transports(Tile(2, 2), CUDA)["row"] is along["row"]
            assert set(mesh.transports(Tile(2, 2), torch.device("cpu")).values()) == {plain}
            assert mesh.transports(Tile(1, 4), CUDA)["row"] is plain, "nothing moves along it"
            assert all(t.traffic is plain.traffic for t in along.values())
            kinds = {axis: isinstance(t, SymmetricTransport) for axis, t in along.items()}
            told.append((kinds["row"], kinds["col"], mesh.describe().partition("; transport ")[2]))
        dist.barrier()
        return told

    want = [
        (True, False, "row symmetric, col p2p (test)"),
        (False, True, "row p2p, col symmetric (test)"),
        (True, True, "row symmetric, col symmetric (test)"),
    ]
    assert run_ranks(4, on_rank, "gloo") == [want] * 4


def test_tensors_of_another_device_are_refused_on_all_ranks() -> None:
    def on_rank(_: object) -> list[str]:
        mesh = ma.init_attention_mesh(tile=(1, 2), timeout=20)
        seq = mesh.sequence(8)
        x = torch.ones(1, seq.rows, 2, 8)
        mesh.connection = replace(mesh.connection, choice="symmetric")
        with pytest.raises(ValueError) as info:
            ma.mesh_attention(x, x, x, seq)
        told = [str(info.value)]
        mesh.connection = replace(mesh.connection, choice="auto", nodes=(0, 0), device=CUDA)
        with pytest.raises(ValueError) as other:
            mesh.connection.check_device(torch.device("cuda", 1))
        mesh.connection.check_device(torch.device("cpu"))
        return [*told, str(other.value)]

    for cpu, other in run_ranks(2, on_rank, "gloo"):
        assert "transport='symmetric' moves memory of CUDA devices" in cpu
        assert "cuda:1" in other and "torch.cuda.set_device" in other
