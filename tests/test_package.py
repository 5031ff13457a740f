"""The package as a whole: lazy names, one version, the boundary between the two import packages."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import meshattn

ROOT = Path(meshattn.__file__).parent.parent


def test_import_is_lazy_and_works_where_torch_is_blocked() -> None:
    code = "import sys; sys.modules['torch'] = None; import meshattn; print(meshattn.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == meshattn.__version__


def test_installed_version_is_that_of_the_package() -> None:
    assert importlib.metadata.version("meshattn") == meshattn.__version__


@pytest.mark.parametrize("name", meshattn.__all__)
def test_every_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(meshattn, name) is not None
    assert name in dir(meshattn)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        _ = meshattn.flash


def imported_modules(path: Path) -> set[str]:
    """Full names of what a file of a package imports, relative imports resolved."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            found.add(".".join([*base, *filter(None, [node.module])]))
    return found


def test_kernels_never_import_meshattn() -> None:
    files = sorted((ROOT / "kernels").rglob("*.py"))
    assert files
    wrong = {
        str(path) for path in files for name in imported_modules(path) if name.split(".")[0] == "meshattn"
    }
    assert not wrong


def test_plans_import_only_plans_and_the_standard_library() -> None:
    files = sorted((ROOT / "meshattn" / "plan").rglob("*.py"))
    assert files
    for path in files:
        for name in imported_modules(path):
            assert name.startswith("meshattn.plan") or name.split(".")[0] in sys.stdlib_module_names, (
                path,
                name,
            )
