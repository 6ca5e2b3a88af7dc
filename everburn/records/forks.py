"""Forks: a run's past up to a step, copied into the folder of a new run.

Owns the choice of copied files. The new folder is that of a run which ended after the step, and its
run continues like a resumed one (workers/cli/resume.py), independently of the old folder and run.
Doesn't own the checkpoints' bytes, which stay at the training service.
"""

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from everburn.config import RECONFIGURABLE, RunConfig
from everburn.learning.group import GroupManifest, all_groups
from everburn.records import metrics
from everburn.records.checkpoints import eligible_checkpoints, record_checkpoint
from everburn.records.commands import Command, record_command
from everburn.records.ids import RunRef, StoredRef
from everburn.records.keys import (
    CONFIG_KEY,
    EVALUATION_ROWS_KEY,
    ROWS_KEY,
    evaluation_key,
    group_key,
    ledger_key,
)
from everburn.records.ledger import LedgerEntry, read_ledger
from everburn.records.run_folder import ORIGIN_KEY, OWNER_KEY, Origin, run_owner
from everburn.records.store import ArtifactStore


class ForkError(ValueError):
    """A run can't be forked at a step, for the reason given."""


def check_past(run: RunRef, step: int) -> None:
    """Check that a run, possibly still running, can be forked after `step`.

    Raises:
        ForkError
    """
    store = ArtifactStore.of(run)
    ledger = read_ledger(store)
    if not 0 <= step <= len(ledger):
        raise ForkError(
            f"run {run.id} has committed {len(ledger)} steps so far: it can be forked at step 0 to "
            f"{len(ledger)}, not at {step}"
        )
    if not store.exists(ROWS_KEY) or not eligible_checkpoints(store, ledger[:step]):
        raise ForkError(
            f"run {run.id} has no checkpoint of step {step} or before: it never began to train"
        )


def copy_past(origin: Origin, target: RunRef, config: RunConfig, at: float) -> None:
    """Copy the past of the run at `origin` for a new run of `config`.

    Copies trained groups, with all files that the ledger names by digest, and rejected groups. Also
    copies untrained groups admitted under a version of that past, unless changed fields could have
    affected them: then their rows are sampled again. Writes config.json last: a folder without it
    isn't a run.

    Raises:
        CorruptArtifactError: a file has changed since it was recorded.
        FileNotFoundError: a file that the ledger names is missing.
        StoreError
    """
    source, copy = ArtifactStore.of(origin.run), ArtifactStore.of(target)
    ledger = read_ledger(source)[: origin.step]
    for group in _untrained_groups(source, ledger, origin):
        _copy_all(source, copy, source.ref(group_key(group.key)))
    for entry in ledger:
        for ref in _named_by(entry):
            _copy_all(source, copy, ref)
        _copy(source, copy, ledger_key(entry.step))
    for checkpoint in eligible_checkpoints(source, ledger):
        record_checkpoint(copy, checkpoint)
    _copy_figures(source, copy, origin.step)
    _copy(source, copy, ROWS_KEY)
    if "evaluation_dataset" not in origin.changes and source.exists(EVALUATION_ROWS_KEY):
        _copy(source, copy, EVALUATION_ROWS_KEY)
    copy.put_json(ORIGIN_KEY, origin.model_dump(mode="json"))
    _copy(source, copy, OWNER_KEY)
    record_command(
        copy,
        Command(
            at=at,
            text=f"forked from {origin}",
            incarnation=run_owner(copy).incarnation + 1,
            step=origin.step,
            changes=origin.changes,
        ),
    )
    copy.put_json(CONFIG_KEY, config.model_dump(mode="json"))


def _untrained_groups(
    store: ArtifactStore, ledger: list[LedgerEntry], origin: Origin
) -> Iterator[GroupManifest]:
    """The untrained groups to copy."""
    trained = {group for entry in ledger for group in entry.groups}
    stay = origin.changes.keys() <= RECONFIGURABLE
    for group in all_groups(store):
        past = group.version <= origin.step and group.key not in trained
        if past and (stay or group.outcome != "accepted"):
            yield group


def _named_by(entry: LedgerEntry) -> Iterator[StoredRef]:
    for group, digest in zip(entry.groups, entry.digests, strict=True):
        yield StoredRef(key=group_key(group), sha256=digest)
    yield from _refs(entry.model_dump(mode="json"))


def _copy_all(source: ArtifactStore, copy: ArtifactStore, ref: StoredRef) -> None:
    """Copy the files that a file names by digest, then the file."""
    if copy.exists(ref.key):
        return
    data = source.get(ref)
    if PurePosixPath(ref.key).suffix == ".json":
        for named in _refs(json.loads(data)):
            _copy_all(source, copy, named)
    copy.put(ref.key, data)


def _refs(value: Any) -> Iterator[StoredRef]:
    """The references within a JSON value."""
    if isinstance(value, dict):
        if value.keys() == StoredRef.model_fields.keys():
            yield StoredRef.model_validate(value)
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _refs(item)


def _copy_figures(source: ArtifactStore, copy: ArtifactStore, step: int) -> None:
    """Copy metrics of the steps, and evaluations of the versions before the fork's first one."""
    records = (r for r in metrics.read(source) if r.stream == metrics.STEP_STREAM)
    metrics.record(copy, [record for record in records if record.index <= step])
    for version in range(step):
        if source.exists(evaluation_key(version)):
            _copy(source, copy, evaluation_key(version))


def _copy(source: ArtifactStore, copy: ArtifactStore, key: str) -> None:
    copy.put(key, source.get(key))
