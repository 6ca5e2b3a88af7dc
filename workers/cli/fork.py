"""`everburn fork`: a new run from the state that another run had after one of its steps.

Owns the checks before the start, and the new run's folder. Doesn't own the copied records
(everburn/records/forks.py) or the state rebuilt from them (resume.py).
"""

import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from everburn.config import ConfigError, changed_fields, forked
from everburn.records.forks import ForkError, check_past, copy_past
from everburn.records.ids import RunRef
from everburn.records.run_folder import Origin
from everburn.records.store import ArtifactStore, StoreError
from workers.cli.resume import known_run, resumed_state
from workers.cli.run_file import RunFile, assign, check_run_id, locate_datasets, new_run_id
from workers.errors import BadInputError, UserError
from workflows.restore import note_taken_over
from workflows.run.state import RunState


@dataclass(frozen=True)
class Fork:
    """A checked fork: `run` starts from `origin` with the configuration `file`."""

    origin: Origin
    run: RunRef
    file: RunFile

    def make(self) -> RunState:
        """Fill the new run's folder; returns the state from which the run starts.

        Raises:
            UserError: a file of the old run is missing or has changed, or can't be copied.
        """
        try:
            copy_past(self.origin, self.run, self.file.config, time.time())
        except (StoreError, FileNotFoundError) as error:
            raise UserError(
                f"{self.origin} can't be copied: {error}. Remove the incomplete copy in "
                f"{self.run.folder} before you try again"
            ) from None
        state = resumed_state(self.run, self.file.config, time.time())
        note_taken_over(state, self.origin.run, self.file.config, self.origin.step)
        return state


def plan_fork(
    name: str, step: int, run_id: str | None, assignments: list[str], folder: Path
) -> Fork:
    """Check what a fork needs; changes nothing.

    name: the run to fork, ended or running. step: start from the state after it. run_id: of the new
    run; None for a new id. assignments: changes of the configuration.

    Raises:
        BadInputError: there is no such run or step, the id is in use, or a changed field can't
            change.
    """
    source, config = known_run(name, folder, step)
    values = config.model_dump(mode="json")
    for assignment in assignments:
        assign(values, assignment)
    locate_datasets(values, folder)
    try:
        changed = forked(config, values)
        check_past(source, step)
    except (ConfigError, ForkError) as error:
        raise BadInputError(str(error)) from None
    if run_id is None:
        run_id = new_run_id(f"{source.id}-step-{step}", source.store, datetime.now())
    run = RunRef(store=source.store, id=check_run_id(run_id))
    target = ArtifactStore.of(run)
    if target.exists(""):
        raise BadInputError(f"{run.folder} exists already: choose another --id, or move the folder")
    origin = Origin(run=source, step=step, changes=changed_fields(config, changed))
    return Fork(origin, run, RunFile(run.id, changed.model_dump(mode="json"), changed))
