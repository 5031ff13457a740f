"""Copy engines and NCCL on GPUs: bytes under random delays, the engine, ranks that die, CUDA graphs.

Several ranks share a GPU where there are more ranks than GPUs; NCCL then goes by sockets. Launches go side by
side, so this file belongs to one process of pytest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu.launches import Launch, Launches
from meshattn.transport.hosts import SHARED_GPU

PROGRAM = Path(__file__).with_name("transport_ranks.py")
SHARED = {SHARED_GPU: "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
SECONDS = 4.0  # timeout of the ranks of which one dies
KILLED = ["killed", "--timeout", str(SECONDS)]
RECORDED = ["--kernel", "triton"]
P2P = ["--transport", "p2p", "--nccl"]
UNCLOSED = ["unclosed", *RECORDED, *P2P]
FSDP = ["beside", "--nccl"]


def queues(number: int) -> dict[str, str]:
    """Hardware queues of a GPU."""
    return {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)}


ONE_GPU = (
    Launch("P4-shared", ["race", "engine", "graph", "recorded"], 4, 1, env=SHARED),
    Launch("P3-shared-killed", KILLED, 3, 1, env=SHARED),
    Launch("P3-shared-killed-recorded", [*KILLED, *RECORDED], 3, 1, env=SHARED),
    Launch("P2-shared", ["engine", "graph", "recorded", "memory", "--nccl"], 2, 1, env=SHARED),
    Launch("P3-shared-killed-p2p", [*KILLED, *P2P], 3, 1, env=SHARED),
    Launch("P2-shared-unclosed", UNCLOSED, 2, 1, env=SHARED),
    Launch("P16-shared", ["race"], 16, 1, timeout=300.0, env=SHARED),
    Launch("P8-shared", ["race"], 8, 1, timeout=300.0, env=SHARED),
)
TWO_GPUS = (
    Launch("P2", ["race", "engine", "graph", "recorded", "repeat", "memory", "--nccl"], 2, 2),
    Launch("P2-killed-symmetric", KILLED, 2, 2),
    Launch("P2-killed-recorded", [*KILLED, *RECORDED], 2, 2),
    Launch("P2-killed-p2p", [*KILLED, *P2P], 2, 2),
    Launch("P2-killed-recorded-p2p", [*KILLED, *RECORDED, *P2P], 2, 2),
    Launch("P2-unclosed", UNCLOSED, 2, 2),
    Launch("P2-training", FSDP, 2, 2),
    Launch("P2-8-queues", ["engine", "--nccl"], 2, 2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
    Launch("P2-32-queues", ["engine", "--nccl"], 2, 2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    Launch(
        "P2-1-queue", ["race", "engine", "recorded", "--nccl"], 2, 2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ),
    Launch("P2-expandable", ["recorded", "--nccl"], 2, 2, env=EXPANDABLE),
    Launch("P2-killed-1-queue", KILLED, 2, 2, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
    Launch("P6-shared", ["race", "engine"], 6, 2, env=SHARED),
)
CHECKS = {
    "race": "no wrong byte under random delays, and some without grants",
    "engine": "every tile equals the oracle and repeats its bits, the same on each transport",
    "graph": "a captured pass gives the bits of an eager one, graphs of each transport in turns",
    "recorded": "passes that recur are recorded, with the bits and traffic of those that are not",
    "repeat": "the same bits on every run under load, on each transport, eager and captured",
    "memory": "memory is that of the formula, and none is taken by steady calls",
    "beside": "500 steps under fully_shard, with changing lengths, have the same losses on each transport",
}
one_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def launches(request: pytest.FixtureRequest) -> Iterator[Launches]:
    """Those that the tests of this run ask for."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    asked = {item.callspec.params.get("launch") for item in items}
    made = Launches(PROGRAM, [launch for launch in (*ONE_GPU, *TWO_GPUS) if launch.name in asked])
    yield made
    made.close()


def _parts(name: str) -> list[str]:
    """The checks of a launch."""
    (launch,) = (x for x in (*ONE_GPU, *TWO_GPUS) if x.name == name)
    return [argument for argument in launch.arguments if argument in CHECKS]


@pytest.mark.parametrize(
    "launch, check",
    [
        pytest.param(launch.name, check, marks=marks, id=f"{launch.name}-{check}")
        for group, marks in ((ONE_GPU, one_gpu), (TWO_GPUS, two_gpus))
        for launch in group
        for check in _parts(launch.name)
    ],
)
def test_check(launch: str, check: str, launches: Launches) -> None:
    """See CHECKS."""
    for rank, outcome in enumerate(launches.outcomes(launch)):
        passed = re.findall(r"passed: (\w+) after", outcome.text)
        assert check in passed, (
            f"{CHECKS[check]}: rank {rank} ended with {outcome.code}:\n{outcome.text[-4000:]}"
        )


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param("P3-shared-killed", marks=one_gpu),
        pytest.param("P3-shared-killed-recorded", marks=one_gpu),
        pytest.param("P3-shared-killed-p2p", marks=one_gpu),
        pytest.param("P2-killed-symmetric", marks=two_gpus),
        pytest.param("P2-killed-recorded", marks=two_gpus),
        pytest.param("P2-killed-p2p", marks=two_gpus),
        pytest.param("P2-killed-recorded-p2p", marks=two_gpus),
    ],
)
def test_a_killed_rank_makes_the_others_raise_in_time(launch: str, launches: Launches) -> None:
    """They name step, transfer and a peer, and their GPU is not blocked for ever."""
    *others, victim = launches.outcomes(launch)
    assert victim.code == -9
    for outcome in others:
        assert outcome.code == 7, outcome.text[-4000:]
        found = re.search(
            r"raised after ([\d.]+) s: (forward|backward) step \d+/\d+, \w+ #\d+: (.*)", outcome.text
        )
        assert found, outcome.text[-4000:]
        assert float(found[1]) < 3 * SECONDS + 5 and "rank" in found[3]
        assert "the device is free" in outcome.text


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param("P2-shared-unclosed", marks=one_gpu),
        pytest.param("P2-unclosed", marks=two_gpus),
    ],
)
def test_groups_may_be_destroyed_while_a_mesh_has_recorded_passes(launch: str, launches: Launches) -> None:
    """NCCL waits for the end of graphs, which nobody else holds."""
    for outcome in launches.outcomes(launch):
        assert outcome.code == 0 and "destroyed after" in outcome.text, outcome.text[-4000:]


@pytest.mark.parametrize("launch", [pytest.param("P2-killed-1-queue", marks=two_gpus)])
def test_with_one_hardware_queue_a_killed_rank_ends_the_others(launch: str, launches: Launches) -> None:
    """Nothing can free a blocked queue that everything goes through: they end, with the reason."""
    other, victim = launches.outcomes(launch)
    assert (other.code, victim.code) == (-6, -9)
    assert re.search(r"meshattn: \w+ step \d+/\d+, \w+ #\d+: .*rank 1.* within 4 s", other.text), other.text
