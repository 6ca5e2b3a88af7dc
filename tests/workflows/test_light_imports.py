"""The orchestrator process imports nothing heavy: it computes nothing and restarts in a second."""

import subprocess
import sys

from support.imports import HEAVY

PROGRAM = """
import sys
import workers.processes
import workflows.run.train_run, workflows.children.prompt_group
import workflows.children.trainer_lease, workflows.children.evaluation
from activities.records import RecordActivities
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_workflows_and_their_workers_import_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()).isdisjoint(HEAVY)
