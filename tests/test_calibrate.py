"""Calibration on gloo ranks: what it finds, writes and refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshattn.cli import main
from meshattn.command import clock
from meshattn.command.measure import Sizes, calibrate
from meshattn.plan.topology import Topology, load_topology
from meshattn.testing import run_ranks
from meshattn_kernels.reference import ReferenceKernel

SIZES = Sizes(
    rows=(8, 16), heads=((6, 2), (1, 1)), head_dim=8, dtype="fp32", messages=(2**10, 2**16), more=((4, 2, 1),)
)


def test_ranks_agree_on_a_topology_that_can_be_planned_with(tmp_path: Path) -> None:
    found = run_ranks(3, lambda group: calibrate(SIZES, torch.device("cpu"), name="mine"), "gloo")
    topology = found[0]
    assert found == [topology] * 3 and isinstance(topology, Topology)
    assert (topology.name, topology.gpus_per_node, topology.inside.sm_share) == ("mine", 3, 0.0)
    sizes = {(b.rows, b.heads, b.kv_heads, b.causal) for b in topology.kernels.blocks}
    assert sizes == {
        (*block, causal)
        for block in ((8, 6, 2), (8, 1, 1), (16, 6, 2), (16, 1, 1), (4, 2, 1))
        for causal in (True, False)
    }
    table = topology.kernels
    assert (table.dtype, topology.inside.copy_engines) == ("fp32", False)
    assert f"torch {torch.__version__}" in table.where.versions and table.where.device and table.where.date
    path = tmp_path / "cluster.json"
    path.write_text(topology.text())
    read = load_topology(path)
    assert read == topology and read.kernels.where == table.where
    assert main(["plan", "--ranks", "3", "--heads", "3", "--topology", str(path)]) == 0


def test_parts_of_a_machine_can_be_nodes() -> None:
    def measure(group: object) -> object:
        try:
            return calibrate(SIZES, torch.device("cpu"), per_node=per_node).gpus_per_node
        except ValueError as error:
            return str(error)

    per_node = 1
    assert run_ranks(2, measure, "gloo") == [1, 1]
    per_node = 3
    assert run_ranks(2, measure, "gloo") == ["3 ranks a node do not divide the 2 ranks"] * 2


def test_the_type_asked_for_is_measured_and_said() -> None:
    seen: list[torch.dtype] = []
    forward = ReferenceKernel.forward

    def spy(self: ReferenceKernel, q: torch.Tensor, *args: object, **options: object) -> None:
        seen.append(q.dtype)
        forward(self, q, *args, **options)  # type: ignore[arg-type]

    sizes = replace(SIZES, rows=(8,), heads=((1, 1),), dtype="bf16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReferenceKernel, "forward", spy)
        (found,) = run_ranks(1, lambda group: (calibrate(sizes, torch.device("cpu")), set(seen)), "gloo")
    assert found[0].kernels.dtype == "bf16" and found[1] == {torch.bfloat16}


def test_a_block_runs_once_before_it_is_timed() -> None:
    """To see that it fits; a long one takes seconds, and no second run makes it more ready."""
    runs = {"forward": 0, "backward": 0}
    sizes = replace(SIZES, rows=(8,), heads=((1, 1),), more=())

    def measure(group: object) -> dict[str, int]:
        with pytest.MonkeyPatch.context() as patch:
            for name in runs:
                whole = getattr(ReferenceKernel, name)

                def spy(*args: object, name: str = name, whole: Any = whole, **options: object) -> None:
                    runs[name] += 1
                    whole(*args, **options)

                patch.setattr(ReferenceKernel, name, spy)
            calibrate(sizes, torch.device("cpu"))
        return runs

    (found,) = run_ranks(1, measure, "gloo")
    timed = 2 * 2 * (1 + clock.REPEATS)  # two masks, two passes: how long it takes, and its times
    assert found["forward"] == 2 * (1 + 2) + timed  # a forward beside, for the backward's lse
    assert found["backward"] == 2 * (2 + 1) + timed  # and one for the workspace


def test_needs_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        main(["calibrate", "--out", "cluster.json"])
    assert "torchrun --nproc-per-node N -m meshattn calibrate" in capsys.readouterr().err


def test_the_kernel_is_the_one_asked_for_or_is_refused_before_anything_is_measured() -> None:
    def measure(group: object) -> object:
        try:
            return calibrate(SIZES, torch.device("cpu"), kernel=kernel).kernels.kernel
        except ValueError as error:
            return str(error)

    kernel = "reference"
    assert run_ranks(2, measure, "gloo") == ["reference"] * 2
    kernel = "hopper"
    assert all("hopper" in str(said) for said in run_ranks(2, measure, "gloo"))


def test_a_block_that_one_rank_has_no_memory_for_is_refused_by_all() -> None:
    """With the options that make it smaller; whatever had to be given up for it."""

    def measure(group: object) -> str:
        def run(*_: object, **__: object) -> None:
            if dist.get_rank() == 1:
                raise torch.OutOfMemoryError("no memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ReferenceKernel, "backward", run)
            with pytest.raises(
                ValueError, match=r"8 rows of 6 heads .*rank 1.*--rows, --heads or --block"
            ) as said:
                calibrate(SIZES, torch.device("cpu"))
        return str(said.value)

    first, *others = run_ranks(3, measure, "gloo")
    assert others == [first] * 2


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rows": (8, 2**20)}, "block of 1048576 rows and 6 heads .*with as many heads give at most"),
        ({"head_dim": 2**40}, "--rows, --heads or --block"),
        ({"rows": (), "more": ((2**18, 1, 1),)}, "block of 262144 rows and 1 heads"),
        ({"messages": (1, 2**60)}, "--messages"),
    ],
    ids=["long", "large", "block", "messages"],
)
def test_sizes_that_cannot_be_measured_are_refused_before_anything_is(
    changed: dict[str, Any], said: str
) -> None:
    def measure(group: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clock.Clock, "us", None)
            with pytest.raises(ValueError, match=said):
                calibrate(replace(SIZES, **changed), torch.device("cpu"))

    run_ranks(1, measure, "gloo")


@pytest.mark.parametrize("messages", [["0", "4k"], ["4k", "4k"]], ids="-".join)
def test_messages_that_give_no_bandwidth_are_refused(
    messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--out", "cluster.json", "--messages", *messages])
    assert "--messages" in capsys.readouterr().err


class FakeGpu:
    """A device that works through what is queued, and a host that needs a while to queue it."""

    def __init__(self, host_us: float, device_us: float) -> None:
        self.host_us, self.device_us = host_us, device_us
        self.host = self.device = 0.0

    def run(self) -> None:
        self.host += self.host_us
        self.device = max(self.device, self.host) + self.device_us

    def sleep(self, cycles: int) -> None:
        self.device = max(self.device, self.host) + 1e6 * cycles / clock.CYCLES

    def synchronize(self, *_: object) -> None:
        self.host = max(self.host, self.device)

    def event(self, **_: bool) -> SimpleNamespace:
        event = SimpleNamespace(at=0.0, synchronize=self.synchronize)
        event.record = lambda: setattr(event, "at", max(self.device, self.host))
        event.elapsed_time = lambda other: (other.at - event.at) / 1e3
        return event


@pytest.mark.parametrize(("host_us", "device_us"), [(60.0, 11.0), (3.0, 800.0), (40.0, 5000.0)])
def test_times_of_gpus_are_the_devices_and_not_the_hosts(
    host_us: float, device_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = FakeGpu(host_us, device_us)
    for name, fake in {"_sleep": gpu.sleep, "Event": gpu.event, "synchronize": gpu.synchronize}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: gpu.host / 1e6))
    found = clock.Clock(torch.device("cuda"), lambda value: value)
    assert found.us(gpu.run, "work") == pytest.approx(device_us)
    assert found.start_us() == pytest.approx(host_us)
