"""Copy engines and NCCL on GPUs: bytes under random delays, the engine, ranks that die, CUDA graphs.

Several ranks share a GPU where there are more ranks than GPUs; NCCL needs a GPU a rank.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gpu.processes import Outcome, run_processes
from meshattn.transport.hosts import SHARED_GPU

PROGRAM = Path(__file__).with_name("transport_ranks.py")
SHARED = {SHARED_GPU: "1"}
one_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = [
    pytest.mark.multigpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
pytestmark = pytest.mark.timeout(200)


def _nccl(transport: str) -> list[str]:
    return ["--nccl"] if transport == "p2p" else []


def _all_right(outcomes: list[Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.code == 0, f"rank {rank} ended with {outcome.code}:\n{outcome.text[-4000:]}"


@pytest.mark.parametrize(
    "ranks, gpus",
    [
        pytest.param(2, 2, marks=two_gpus),
        pytest.param(4, 1, marks=one_gpu),
        pytest.param(6, 2, marks=two_gpus),
        pytest.param(16, 2, marks=[*two_gpus, pytest.mark.slow]),
    ],
    ids=lambda n: str(n),
)
def test_no_wrong_byte_under_random_delays(ranks: int, gpus: int) -> None:
    _all_right(run_processes(PROGRAM, ["race"], ranks, gpus=gpus, timeout=180, env=SHARED))


@pytest.mark.parametrize("queues", [1, 8, 32])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=two_gpus)])
def test_any_number_of_hardware_queues(ranks: int, queues: int) -> None:
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
    _all_right(run_processes(PROGRAM, ["race"], ranks, gpus=2, timeout=100, env=env))
    _all_right(run_processes(PROGRAM, ["engine", "--nccl"], ranks, gpus=2, timeout=180, env=env))


@pytest.mark.parametrize(
    "ranks, gpus", [pytest.param(4, 1, marks=one_gpu), pytest.param(6, 2, marks=two_gpus)]
)
def test_every_tile_equals_the_oracle_and_repeats_its_bits(ranks: int, gpus: int) -> None:
    _all_right(run_processes(PROGRAM, ["engine"], ranks, gpus=gpus, timeout=180, env=SHARED))


@pytest.mark.parametrize(
    "transport, ranks, gpus",
    [
        pytest.param("symmetric", 2, 1, marks=one_gpu),
        pytest.param("symmetric", 2, 2, marks=two_gpus),
        pytest.param("p2p", 2, 2, marks=two_gpus),
    ],
)
def test_a_captured_pass_gives_the_bits_of_an_eager_one(transport: str, ranks: int, gpus: int) -> None:
    arguments = ["graph", "--transport", transport, *_nccl(transport)]
    _all_right(run_processes(PROGRAM, arguments, ranks, gpus=gpus, timeout=150, env=SHARED))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=two_gpus)])
def test_the_same_bits_on_every_run_under_load(ranks: int) -> None:
    """On each transport, eager and captured."""
    _all_right(run_processes(PROGRAM, ["repeat", "--nccl"], ranks, gpus=2, timeout=150))


@pytest.mark.parametrize("transport", ["symmetric", "p2p"])
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=two_gpus)])
def test_memory_is_that_of_the_formula(ranks: int, transport: str) -> None:
    arguments = ["memory", "--transport", transport, *_nccl(transport)]
    _all_right(run_processes(PROGRAM, arguments, ranks, gpus=2, timeout=150))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=two_gpus)])
@pytest.mark.parametrize("steps", [120, pytest.param(500, marks=pytest.mark.slow)])
def test_training_under_fsdp_gives_the_same_losses_on_each_transport(ranks: int, steps: int) -> None:
    arguments = ["beside", "--nccl", "--steps", str(steps)]
    _all_right(run_processes(PROGRAM, arguments, ranks, gpus=2, timeout=190))


@pytest.mark.parametrize(
    "transport, ranks, gpus",
    [
        pytest.param("symmetric", 3, 1, marks=one_gpu),
        pytest.param("symmetric", 2, 2, marks=two_gpus),
        pytest.param("p2p", 2, 2, marks=two_gpus),
    ],
)
def test_a_killed_rank_makes_the_others_raise_in_time(transport: str, ranks: int, gpus: int) -> None:
    """They name step, transfer and a peer, and their GPU is not blocked for ever."""
    seconds = 4.0
    arguments = ["killed", "--transport", transport, "--timeout", str(seconds)]
    arguments += _nccl(transport)
    *others, victim = run_processes(PROGRAM, arguments, ranks, gpus=gpus, timeout=100, env=SHARED)
    assert victim.code == -9
    for outcome in others:
        assert outcome.code == 7, outcome.text[-4000:]
        found = re.search(
            r"raised after ([\d.]+) s: (forward|backward) step \d+/\d+, \w+ #\d+: (.*)", outcome.text
        )
        assert found, outcome.text[-4000:]
        assert float(found[1]) < 3 * seconds + 5 and "rank" in found[3]
        assert "the device is free" in outcome.text


@pytest.mark.parametrize("gpus", [pytest.param(2, marks=two_gpus)])
def test_with_one_hardware_queue_a_killed_rank_ends_the_others(gpus: int) -> None:
    """Nothing can free a blocked queue that everything goes through: they end, with the reason."""
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    other, victim = run_processes(PROGRAM, ["killed", "--timeout", "4"], 2, gpus=gpus, timeout=100, env=env)
    assert (other.code, victim.code) == (-6, -9)
    assert re.search(r"meshattn: \w+ step \d+/\d+, \w+ #\d+: .*rank 1.* within 4 s", other.text), other.text
