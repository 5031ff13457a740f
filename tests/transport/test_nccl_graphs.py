"""Graphs with exchanges of NCCL, when process groups go before the mesh is closed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from meshattn.transport import nccl
from meshattn.transport.nccl import NcclGroup, running
from waiting import eventually

pytestmark = pytest.mark.timeout(30)


class Pending:
    """An exchange that has ended."""

    failure = ""

    def __getattr__(self, name: str) -> Any:
        return lambda: True


class Group:
    """One whose end waits for that of graphs, as NCCL's does."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(_set_default_timeout=lambda timeout: None)

    def shutdown(self) -> None:
        assert self.free.wait(20), "it waits for ever"


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    made = Group()
    for table in (c10d._world.pg_map, c10d._world.pg_names, c10d._world.pg_group_ranks):
        monkeypatch.setitem(table, made, ("x", None))  # type: ignore[arg-type]
    for table in (c10d._world.pg_backend_config, c10d._world.pg_to_tag):
        monkeypatch.setitem(table, made, None)  # type: ignore[call-overload]
    monkeypatch.setattr(c10d, "_unregister_process_group", lambda name: None)
    made.group_name = "x"  # type: ignore[attr-defined]
    yield made


@pytest.fixture
def of_nccl(group: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclGroup]:
    """What the transport has beside the group; its thread watches."""
    monkeypatch.setattr(nccl, "enter_watching_thread", lambda device: None)
    made = NcclGroup(group, torch.device("cpu"), 5.0)
    made._watch.add(Pending())
    yield made
    made.close()


def test_groups_that_are_destroyed_do_not_wait_for_graphs_of_the_mesh(
    group: Group, of_nccl: NcclGroup
) -> None:
    dropped: list[str] = []

    def forget() -> None:
        dropped.append("graphs")
        group.free.set()

    of_nccl.record(forget)
    of_nccl.recorded()
    assert not eventually(lambda: bool(dropped), 0.6), "nobody destroys anything"
    destroy: Any = dist.destroy_process_group
    destroy(group)
    assert dropped == ["graphs"]


def test_the_end_of_another_group_leaves_graphs_alone(of_nccl: NcclGroup) -> None:
    dropped: list[str] = []
    of_nccl.record(lambda: dropped.append("graphs"))
    of_nccl.recorded()
    leave = threading.Event()

    def as_pytorch(group: Any) -> None:
        leave.wait(10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", as_pytorch)
        for group, concerned in ((Group(), False), (None, True)):
            leave.clear()
            destroying = threading.Thread(target=dist.destroy_process_group, args=(group,))
            destroying.start()
            assert eventually(lambda: bool(dropped), 0.6) == concerned
            leave.set()
            destroying.join()


def test_graphs_of_the_user_that_hold_it_up_are_named(
    group: Group,
    of_nccl: NcclGroup,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_SUSPICIOUS", 0.6)
    of_nccl.captured = True
    destroying = threading.Thread(target=dist.destroy_process_group, args=(group,))
    destroying.start()
    assert not eventually(lambda: "destroy" in capfd.readouterr().err, 0.4), "it takes its time"
    said = ""

    def told() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "call their reset()" in said

    assert eventually(told, 10)
    group.free.set()
    destroying.join(10)
    assert not destroying.is_alive() and said.count("destroy_process_group() waits") == 1


def test_the_frames_of_a_function_that_runs_in_some_thread() -> None:
    inside, leave = threading.Event(), threading.Event()

    def outer() -> None:
        inner()

    def inner() -> None:
        inside.set()
        leave.wait(10)

    assert not [*running(outer)]
    thread = threading.Thread(target=outer)
    thread.start()
    assert inside.wait(10) and len([*running(outer)]) == len([*running(inner)]) == 1
    leave.set()
    thread.join()
    assert not [*running(outer)]
    assert not [*running(functools.partial(outer))], "nobody can see whether that runs"
