"""The portable kernels compile for every GPU generation, without spilling, on a machine without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

knobs = pytest.importorskip("triton.knobs")
TARGETS = (80, 86, 89, 90, 100, 120)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def has_ptxas(target: int) -> bool:
    try:
        return Path((knobs.nvidia.ptxas_blackwell if target >= 100 else knobs.nvidia.ptxas).path).exists()
    except RuntimeError:
        return False


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target}")
def test_covering_set_compiles_without_spills(target: int) -> None:
    """In a process of its own: nothing compiles where triton was imported to interpret."""
    if not has_ptxas(target):
        pytest.skip(f"triton has no ptxas for sm_{target} here")
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_portable.py")), "--targets", str(target)],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert f"| sm_{target} | dash bf16" in run.stdout, run.stdout
