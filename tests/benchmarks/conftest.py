"""The benchmarks are scripts that stand beside each other; here they are modules."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
