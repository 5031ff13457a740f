"""Plans and the command line work where torch, numpy and einops cannot be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "einops", "triton", "meshattn_kernels"):
            raise ImportError(f"{name} is blocked")
        return None

sys.meta_path.insert(0, Refuse())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_block_works() -> None:
    assert "torch is blocked" in run("import torch").stderr


def test_plan_imports_builds_and_checks() -> None:
    result = run(
        "import meshattn.plan as p\n"
        "tile = p.Tile(2, 3)\n"
        "p.check(p.build('backward', tile, p.Costs(1, 2, 2, 1, 2)))\n"
        "assert 'torch' not in sys.modules\n"
        "print(sorted(name for name in p.__all__ if not hasattr(p, name)))\n"
    )
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "schedule --ranks 4 --ratio 1",
        "assignment --ranks 4 --tile 2x2",
        "layouts --ranks 4 --window 512 0",
        "plan --ranks 4 --topology dgx-h200",
        "--help",
    ],
)
def test_command_line_runs(command: str) -> None:
    result = run(f"from meshattn.cli import main\nsys.exit(main({command.split()!r}))")
    assert result.returncode == 0 and result.stdout, result.stderr
