"""The classification of an exception, also if user code or libraries have wrapped it."""

import asyncio
from pathlib import Path

import pytest

from everburn import RecoverableRolloutError
from everburn.agentic import TraceIntegrityError
from everburn.config import Entrypoint
from everburn.records.store import CorruptArtifactError, StoreError, StoreFullError
from everburn.rollouts.failures import (
    Failure,
    SnapshotGoneError,
    classify,
    decisive_error,
    needs_fresh_samples,
)
from everburn.usercode.entrypoints import EntrypointError, resolve

GONE = SnapshotGoneError("policy version 3 isn't served")
SLOW = RecoverableRolloutError("the judge is asleep")
CUT_OFF = StoreError("can't read")
WRONG = KeyError("answer")


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GONE, "snapshot_gone"),
        (StoreFullError("no space"), "store_full"),
        (StoreError("can't read"), "store_failed"),
        (CorruptArtifactError("it has changed"), "fatal"),
        (SLOW, "recoverable"),
        (TimeoutError(), "recoverable"),
        (ConnectionResetError(), "recoverable"),
        (WRONG, "fatal"),
        (caused(RuntimeError("the agent failed"), GONE), "snapshot_gone"),
        (caused(RuntimeError("the agent failed"), TimeoutError()), "recoverable"),
        (caused(RuntimeError("the agent failed"), CUT_OFF), "store_failed"),
        (caused(RuntimeError("the agent failed"), WRONG), "fatal"),
    ],
)
def test_an_error_is_classified_by_its_cause(error: Exception, kind: Failure):
    assert classify(error) == kind


async def test_an_error_of_parallel_calls_is_classified_like_a_single_error():
    """User code that samples or calls tools in an asyncio.TaskGroup raises such groups."""

    async def fail() -> None:
        raise GONE

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.Event().wait())
    assert classify(caught.value) == "snapshot_gone"
    assert decisive_error(caught.value) is GONE


@pytest.mark.parametrize(
    ("members", "kind", "telling_one"),
    [
        ([SLOW], "recoverable", SLOW),
        ([GONE, SLOW], "recoverable", SLOW),
        ([GONE, SLOW, WRONG], "fatal", WRONG),
        ([CUT_OFF, SLOW], "recoverable", SLOW),
        ([StoreFullError("no space"), CUT_OFF], "store_failed", CUT_OFF),
        (
            [ExceptionGroup("tools", [GONE]), ExceptionGroup("calls", [GONE, SLOW])],
            "recoverable",
            SLOW,
        ),
        ([SLOW, SLOW], "recoverable", SLOW),
    ],
)
def test_an_exception_group_is_classified_by_its_worst_error(
    members: list[Exception], kind: Failure, telling_one: Exception
):
    group = ExceptionGroup("unhandled errors in a TaskGroup", members)
    assert classify(group) == kind
    assert classify(caused(RuntimeError("the agent failed"), group)) == kind
    assert decisive_error(group) is telling_one


def test_any_other_error_is_its_own_decisive_error():
    wrapped = caused(RuntimeError("the agent failed"), GONE)
    assert decisive_error(wrapped) is wrapped


def test_a_cycle_of_causes_terminates():
    """`raise group.exceptions[0] from group`"""
    unknown = RuntimeError("one of several")
    circle = caused(unknown, ExceptionGroup("several", [unknown, GONE]))
    assert classify(circle) == "fatal"


def test_unusable_samples_are_recognized_inside_an_exception_group():
    rejected = TraceIntegrityError("these samples won't do")
    group = ExceptionGroup("several", [SLOW, ExceptionGroup("more", [GONE, rejected])])
    assert needs_fresh_samples(rejected) and needs_fresh_samples(group)
    assert not needs_fresh_samples(SLOW) and not needs_fresh_samples(WRONG)
    assert not needs_fresh_samples(ExceptionGroup("several", [SLOW, WRONG]))


def test_a_failed_import_is_not_a_failure_of_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """This holds for any error that the import raises."""
    (tmp_path / "needs_a_service.py").write_text("raise ConnectionRefusedError('no database')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EntrypointError, match="no database") as caught:
        resolve(Entrypoint(name="needs_a_service:make_rollout_fn"))
    assert classify(caught.value) == "fatal"
