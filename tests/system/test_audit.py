"""An audit detects a repeated execution, whichever attempt it was recorded under."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from everburn.records.ids import GroupKey, GroupOutcome, RunRef
from everburn.records.keys import group_key, rollout_key
from everburn.records.store import ArtifactStore
from support.records import a_group, a_member
from system.audit import AuditError, check_executions
from system.tiny_task import Execution

Write = Callable[[GroupKey, GroupOutcome, float], None]
ROW = 3


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    return RunRef(store=str(tmp_path), id="run")


@pytest.fixture
def write(run: RunRef) -> Write:
    """Record a group of one completion at a given time."""
    store = ArtifactStore.of(run)

    def write(key: GroupKey, outcome: GroupOutcome, at: float) -> None:
        stored = store.put(rollout_key(key, 0), b"rollout")
        os.utime(store.path(stored.key), (at, at))
        member = a_member(stored, advantage=0.0, row_index=key.cursor)
        group = a_group(key, [member], outcome=outcome, rejected=outcome == "filtered")
        store.put_json(group_key(key), group.model_dump(mode="json"))

    return write


def executed(pid: int, begun: float, returned: float) -> list[Execution]:
    def event(what: Literal["begun", "returned"], at: float) -> Execution:
        return Execution(what, ROW, 0, pid, at)

    return [event("begun", begun), event("returned", returned)]


def test_an_interrupted_execution_may_be_repeated(run: RunRef, write: Write) -> None:
    write(GroupKey(cursor=ROW), "accepted", 9.0)
    check_executions(run, [Execution("begun", ROW, 0, 1, 2.0), *executed(2, 4.0, 8.0)])


def test_a_recorded_completion_of_a_later_attempt_is_noticed(run: RunRef, write: Write) -> None:
    write(GroupKey(cursor=ROW), "incomplete", 9.0)
    write(GroupKey(cursor=ROW, attempt=1), "accepted", 19.0)
    with pytest.raises(AuditError, match=r"began 3\.000 s after it was recorded"):
        check_executions(run, [*executed(1, 4.0, 8.0), *executed(2, 12.0, 18.0)])


def test_a_rejected_rows_completion_is_noticed_too(run: RunRef, write: Write) -> None:
    write(GroupKey(cursor=ROW), "filtered", 9.0)
    with pytest.raises(AuditError, match="after it was recorded"):
        check_executions(run, [*executed(1, 4.0, 8.0), *executed(2, 12.0, 18.0)])
