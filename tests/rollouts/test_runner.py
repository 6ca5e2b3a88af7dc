"""One completion, from the call of the rollout function to its terminal record."""

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, RolloutOutcome, RunRef
from everburn.records.keys import rollout_key
from everburn.records.store import ArtifactStore, StoreFullError
from everburn.rollouts import attempt as rollout_attempt
from everburn.rollouts.runner import RolloutRunner
from everburn.usercode.deadlines import SelfCancelledError
from support.full_disk import FullDisk
from support.script import Draw, spread
from support.scripted_run import scripted_run
from support.waiting import until

ROW = GroupKey(cursor=0)


async def complete(run: RunRef, group: GroupKey = ROW) -> RolloutOutcome:
    return await RolloutRunner(run).complete(group, 0, version=0)


async def test_a_finished_rollout_is_kept_if_the_store_cant_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process with too many open files: the patch replaces the operating system's answer."""
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("/sandboxes"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return scandir(path)

    async def play(draw: Draw) -> float:
        monkeypatch.setattr(os, "scandir", refuse)
        return 0.5

    run = scripted_run(tmp_path, play)
    store = ArtifactStore.of(run)
    store.put("sandboxes/of-another", b"")
    assert (await complete(run)).status == "succeeded"
    _, rollout = read_rollout(store, rollout_key(ROW, 0))
    assert rollout.segments[0].reward == 0.5
    assert any("Too many open files" in record.message for record in caplog.records)


async def test_an_attempt_fails_if_there_is_no_space_for_a_reused_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails before its timeout, which would count as a failure of the rollout."""
    monkeypatch.setattr(rollout_attempt, "STORE_PATIENCE", -1.0)
    run = scripted_run(tmp_path, spread)
    await complete(run)
    again = GroupKey(cursor=0, attempt=1)
    disk = FullDisk(rollout_key(again, 0), times=10)
    disk.install(monkeypatch)
    with pytest.raises(StoreFullError, match="No space left"):
        await complete(run, again)
    assert disk.refused == 1
    disk.times = 0
    assert (await complete(run, again)).reused


async def test_a_completion_that_cancels_itself_fails_with_a_reason(tmp_path: Path) -> None:
    async def play(draw: Draw) -> float:
        aside = asyncio.create_task(asyncio.Event().wait())
        aside.cancel()
        await aside
        return 1.0

    with pytest.raises(SelfCancelledError, match="without being cancelled"):
        await complete(scripted_run(tmp_path, play))


async def test_a_completion_that_has_returned_is_kept_if_its_attempt_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was down cancels an attempt that it has timed out meanwhile."""
    run = scripted_run(tmp_path, spread)
    disk = FullDisk(rollout_key(ROW, 0), times=10**6)
    disk.install(monkeypatch)
    attempt = asyncio.create_task(complete(run))
    await until(lambda: disk.refused > 0)
    for _ in range(2):
        attempt.cancel()
        await asyncio.sleep(0)
    disk.times = 0
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert (await complete(run)).reused
