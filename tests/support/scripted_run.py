"""Runs of scripted rollouts without a workflow."""

from pathlib import Path
from typing import Any

from everburn.records.ids import RunRef
from everburn.records.keys import EVALUATION_ROWS_KEY, ROWS_KEY
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import write_rows
from support.agents import a_config
from support.script import Play, Script, scripts
from support.tasks import rows


def scripted_run(folder: Path, play: Play, count: int = 1, **fields: Any) -> RunRef:
    """A run's folder with `count` rows and `count` held-out rows. `play` determines the results of
    its completions; `fields` override its configuration."""
    run = RunRef(store=str(folder), id="scripted")
    scripts[run.folder] = Script(play)
    values = {"rollout": "support.tasks:make_rollout_fn", "extras": {"script": run.folder}}
    config = a_config("http://127.0.0.1:9", **(values | fields))
    create_run_folder(run, config, Owner(first_execution_id="test"))
    for key in (ROWS_KEY, EVALUATION_ROWS_KEY):
        write_rows(ArtifactStore.of(run), key, rows(count))
    return run
