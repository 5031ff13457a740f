"""The portable kernels compile for every GPU generation, within the limits of ``compile_portable``, without a
GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

knobs = pytest.importorskip("triton.knobs")
TARGETS = (80, 86, 89, 90, 100, 120)


def has_ptxas(target: int) -> bool:
    try:
        return Path((knobs.nvidia.ptxas_blackwell if target >= 100 else knobs.nvidia.ptxas).path).exists()
    except RuntimeError:
        return False


def compile_for(targets: list[int], *options: str) -> str:
    """Output of the script, in a process of its own: nothing compiles where triton was imported to
    interpret."""
    script = Path(__file__).with_name("compile_portable.py")
    run = subprocess.run(
        [sys.executable, str(script), "--targets", *map(str, targets), *options],
        env=os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout


@pytest.mark.timeout(600)
def test_covering_set_compiles() -> None:
    targets = [target for target in TARGETS if has_ptxas(target)]
    if not targets:
        pytest.skip("triton has no ptxas here")
    assert f"| sm_{targets[-1]} | d" in compile_for(targets)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"sm_{target}")
def test_every_variant_compiles(target: int) -> None:
    if not has_ptxas(target):
        pytest.skip(f"triton has no ptxas for sm_{target} here")
    compile_for([target], "--all", "--jobs", str(os.cpu_count() or 1))
