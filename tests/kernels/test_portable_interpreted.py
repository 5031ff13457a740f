"""Runs the tests of the portable kernels, and of the passes over rows, in Triton's interpreter.

In a process of their own: TRITON_INTERPRET counts only if it is set before triton is first imported, by
whichever test, and nothing can be compiled in a process where it is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "tests",
    [
        "test_portable.py",
        "test_portable_scores.py",
        "test_portable_parts.py",
        "test_row_passes.py",
        "test_masked_engine.py",
    ],
)
def test_in_the_interpreter(tests: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "300"]
    run = subprocess.run(
        [*command, str(Path(__file__).with_name(tests))],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout, run.stdout
