"""Benchmarks: run them from the root of the repository, `python -m benchmarks.NAME`.

They share real processes, audits and a tiny task with the tests (tests/system/).
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
