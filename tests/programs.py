"""Programs that are started by path, as modules: some share their name with a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("started_program", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
