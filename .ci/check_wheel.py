"""Build the wheel and prove that it holds what it should: run by `make wheel-check`.

The wheel must own the import names `meshattn` and `meshattn_kernels` and no other, and both must import
outside the repository, in a fresh environment, first without torch and then with it.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = {"meshattn", "meshattn_kernels"}
LEFT_OUT = (".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")

WITHOUT_TORCH = """
import importlib.util, meshattn, meshattn.plan
assert importlib.util.find_spec("torch") is None, "this environment was to have no torch"
foreign = [name for name in ("kernels", "launch", "tests", "benchmarks") if importlib.util.find_spec(name)]
assert not foreign, f"importable outside the repository: {foreign}"
print("meshattn", meshattn.__version__, "from", meshattn.__file__)
"""

# Every public name is reached, so that a module missing from the wheel fails here.
WITH_TORCH = """
import meshattn, meshattn_kernels
for name in meshattn.__all__:
    getattr(meshattn, name)
assert "site-packages/meshattn_kernels" in meshattn_kernels.__file__, meshattn_kernels.__file__
"""


def build(source: Path, target: Path) -> Path:
    """Build from a copy, so that a stale `build/` cannot slip files of the past into the wheel."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--wheel-dir", str(target), str(source)], check=True)
    (wheel,) = target.glob("*.whl")
    return wheel


def check_names(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    packages = {name for name in top if not name.endswith(".dist-info")}
    if packages != EXPECTED or len(top) != len(EXPECTED) + 1:
        raise SystemExit(f"{wheel.name} has the top-level names {sorted(top)}; expected {sorted(EXPECTED)}")
    untyped = [package for package in sorted(EXPECTED) if f"{package}/py.typed" not in names]
    if untyped:
        raise SystemExit(f"{wheel.name} has no py.typed in {untyped}")


def check_imports(wheel: Path, home: Path) -> None:
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    # -I: with PYTHONPATH the checkout would pass for an installation of it.
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True)
    subprocess.run([python, "-I", "-c", WITHOUT_TORCH], check=True, cwd="/")
    # torch and einops come from the environment that runs this script. A path line adds that folder but does
    # not run the path lines inside it, so an editable install there stays out of sight.
    (site,) = home.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([python, "-I", "-c", WITH_TORCH], check=True, cwd="/")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        wheel = build(base / "source", base / "wheel")
        check_names(wheel)
        check_imports(wheel, base / "venv")
        print(f"{wheel.name}: top-level names {', '.join(sorted(EXPECTED))}; imports in a clean environment")


if __name__ == "__main__":
    main()
