"""Benchmarks: programs to be started from the root of the repository, `python -m benchmarks.NAME`.

Their machinery (real processes, audits, a tiny task) is that of the tests, in tests/system/.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
