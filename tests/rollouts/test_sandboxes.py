"""Sandboxes of completions are reaped when the completions end, whatever ends them."""

import asyncio
import time
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from everburn import RecoverableRolloutError
from everburn.records import store as store_module
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import completion_name
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore, StoreError
from everburn.rollouts import sandboxes as sandboxes_module
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.sampling import CompletionScope, current_scope
from everburn.rollouts.sandboxes import (
    Sandbox,
    Sandboxes,
    SupersededError,
    reap,
    reap_at_end,
    sandbox_keys,
)
from everburn.usercode.entrypoints import EntrypointError
from support.agents import a_config, a_folder, complete, complete_elsewhere
from support.command_line import Everburn
from support.sandboxes import REAPER, left, made_by, noted
from support.waiting import until


def a_run(folder: Path, how: str, **fields: Any) -> RunRef:
    """A run whose completions end in a certain way; nothing is sampled."""
    config = a_config(
        "http://nowhere.invalid",
        rollout="support.sandboxes:make_rollout_fn",
        extras={"sandboxes": str(folder / "sandboxes"), "how": how},
        **fields,
    )
    return a_folder(folder, config)


def check_nothing_is_left(folder: Path, run: RunRef, made: int = 1) -> None:
    assert len(made_by(folder / "sandboxes")) == made
    assert left(folder / "sandboxes") == (0, 0)
    assert sandbox_keys(ArtifactStore.of(run)) == []


@pytest.mark.parametrize("how", ["succeed", "drop"])
async def test_a_completion_that_returns_leaves_no_sandbox(tmp_path: Path, how: str) -> None:
    run = a_run(tmp_path, how)
    await complete(run)
    check_nothing_is_left(tmp_path, run)


async def test_a_completion_that_fails_leaves_no_sandbox(tmp_path: Path) -> None:
    run = a_run(tmp_path, "fail")
    with pytest.raises(RecoverableRolloutError, match="power"):
        await complete(run)
    check_nothing_is_left(tmp_path, run)


async def test_a_completion_survives_a_store_that_cant_list_its_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The completion has a result by then, which is kept."""
    monkeypatch.setattr(store_module, "RETRY_INTERVAL", 0.01)
    look, asked = ArtifactStore.exists, []

    def look_unless_first(store: ArtifactStore, key: str) -> bool:
        if key.startswith("sandboxes/"):
            asked.append(key)
            if len(asked) == 1:
                raise StoreError(f"can't look for {key}: Input/output error")
        return look(store, key)

    monkeypatch.setattr(ArtifactStore, "exists", look_unless_first)
    run = a_run(tmp_path, "succeed")
    await complete(run)
    assert len(asked) == 2
    check_nothing_is_left(tmp_path, run)


async def test_a_completion_that_misses_its_deadline_leaves_no_sandbox(tmp_path: Path) -> None:
    run = a_run(tmp_path, "hang", rollout_timeout=2.0)
    with pytest.raises(TimeoutError, match=r"^not finished within rollout_timeout \(2 s\)$"):
        await complete(run)
    check_nothing_is_left(tmp_path, run)


async def test_a_completion_that_is_cancelled_leaves_no_sandbox(tmp_path: Path) -> None:
    run = a_run(tmp_path, "hang")
    work = asyncio.create_task(complete(run))
    await until(lambda: (tmp_path / "sandboxes" / "made").exists())
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    check_nothing_is_left(tmp_path, run)


async def test_an_evaluation_leaves_no_sandbox(tmp_path: Path) -> None:
    run = a_run(tmp_path, "succeed")
    runner = RolloutRunner(run)
    await runner.evaluate(0, version=3)
    await runner.evaluation_rollout_fn(3)({"ask": "go"})
    check_nothing_is_left(tmp_path, run, made=2)


async def test_the_next_attempt_reaps_the_sandboxes_of_a_dead_worker(tmp_path: Path) -> None:
    run = a_run(tmp_path, "die")
    killed = await complete_elsewhere(run)
    assert killed.returncode == -9, killed.stderr
    assert left(tmp_path / "sandboxes") == (1, 1)

    await complete(run)
    assert len(set(made_by(tmp_path / "sandboxes"))) == 2
    check_nothing_is_left(tmp_path, run, made=2)


async def an_attempt(run: RunRef, retry: int) -> "asyncio.Task[Any]":
    """A running attempt at the first completion that has made its sandbox."""
    sandboxes = Path(stored_config(run).extras["sandboxes"])
    before = len(made_by(sandboxes)) if (sandboxes / "made").exists() else 0
    completion = RolloutRunner(run).complete(GroupKey(cursor=0), 0, 0, retry)
    work = asyncio.create_task(completion)
    await until(lambda: (sandboxes / "made").exists() and len(made_by(sandboxes)) > before)
    return work


async def test_a_superseded_attempt_reaps_nothing_of_its_successors(tmp_path: Path) -> None:
    run = a_run(tmp_path, "hang")
    first = await an_attempt(run, retry=0)
    second = await an_attempt(run, retry=1)
    assert left(tmp_path / "sandboxes") == (1, 1), "the second has reaped what the first had"

    first.cancel()
    await asyncio.wait([first])
    assert left(tmp_path / "sandboxes") == (1, 1), "the first had nothing any more"

    second.cancel()
    await asyncio.wait([second])
    check_nothing_is_left(tmp_path, run, made=2)


async def test_an_attempt_that_begins_late_reaps_nothing_of_a_later_one(tmp_path: Path) -> None:
    run = a_run(tmp_path, "hang")
    second = await an_attempt(run, retry=1)
    first = await an_attempt(run, retry=0)
    assert left(tmp_path / "sandboxes") == (2, 2)
    for work in (first, second):
        work.cancel()
        await asyncio.wait([work])
    check_nothing_is_left(tmp_path, run, made=2)


async def test_an_attempt_whose_sandboxes_another_has_reaped_fails(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path, "wait")
    first = await an_attempt(run, retry=0)
    second = await an_attempt(run, retry=1)
    (tmp_path / "sandboxes" / "go").touch()
    with pytest.raises(SupersededError, match="another attempt at it has begun"):
        await first
    assert (await second).status == "succeeded"


async def test_sandboxes_of_an_ended_run_can_be_reaped_by_command(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs", "die")
    store, left_behind = ArtifactStore.of(run), tmp_path / "sandbox"
    left_behind.mkdir()
    name = completion_name(GroupKey(cursor=0), 0)
    await in_a_completion(store, name, "shutil:rmtree", path=str(left_behind))
    everburn = Everburn(tmp_path)

    done = await asyncio.to_thread(everburn, "reap", run.id, "--ended")
    assert done.returncode == 0, done.stderr
    assert "run agents: 1 sandboxes reaped, 0 left" in done.stdout
    assert not left_behind.exists() and sandbox_keys(store) == []

    await in_a_completion(store, name, "shutil:rmtree", path=str(left_behind))
    done = await asyncio.to_thread(everburn, "reap", run.id, "--ended")
    assert done.returncode == 1
    assert "0 sandboxes reaped, 1 left" in done.stdout and "FileNotFoundError" in done.stdout


async def test_the_reap_command_has_the_modules_and_keys_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "runs", "die")
    left_behind = tmp_path / "sandbox"
    left_behind.mkdir()
    (tmp_path / "farm.py").write_text(
        "import os\n\n"
        "def end(path):\n"
        "    assert os.environ['FARM_KEY'] == 'fk'\n"
        "    os.rmdir(path)\n"
    )
    (tmp_path / ".env").write_text("FARM_KEY=fk\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = completion_name(GroupKey(cursor=0), 0)
    await in_a_completion(ArtifactStore.of(run), name, "farm:end", path=str(left_behind))
    done = await asyncio.to_thread(Everburn(tmp_path), "reap", run.id, "--ended")
    assert done.returncode == 0, done.stdout
    assert not left_behind.exists()


async def in_a_completion(
    store: ArtifactStore, name: str, reaper: str, **arguments: Any
) -> Sandbox:
    """Register a sandbox for the completion of this name."""
    context = copy_context()
    context.run(current_scope.set, CompletionScope(f"completion {name}", 0, name=name))
    registering = Sandboxes(store).register(reaper, **arguments)
    return await asyncio.get_running_loop().create_task(registering, context=context)


async def test_reaping_a_name_reaps_only_it_and_the_names_below_it(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    for name in ("row-000001.0.completion-1", "row-000001.0.completion-11", "row-000001.1.x"):
        await in_a_completion(store, name, REAPER, folder=str(tmp_path / "none"))

    assert (await reap(store, "row-000001.0.completion-1")).count == 1
    assert (await reap(store, "row-000001.0")).count == 1
    assert [key.split("/")[1][:14] for key in sandbox_keys(store)] == ["row-000001.1.x"]
    assert (await reap(store)).count == 1
    assert (await reap(store)).count == 0


async def test_a_completions_sandboxes_are_reaped_the_latest_first(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    noted.clear()
    for number in range(3):
        await in_a_completion(store, "c", "support.sandboxes:note", number=number)
    await reap(store, "c")
    assert noted == [2, 1, 0]


async def test_a_sandbox_that_was_reaped_early_is_not_reaped_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    noted.clear()
    sandbox = await in_a_completion(store, "c", "support.sandboxes:note", number=7)
    await sandbox.reap()
    await sandbox.reap()
    await reap(store)
    assert noted == [7]


async def test_a_reaper_that_fails_is_logged_and_called_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    await in_a_completion(store, "c", "support.sandboxes:refuse", folder="x")
    for _ in range(2):
        done = await reap(store)
        assert done.count == 0
        assert done.failures == [
            "completion c: support.sandboxes:refuse: PermissionError: it isn't ours"
        ]


def take_forever() -> None:
    time.sleep(600)


async def test_a_reaper_that_hangs_delays_no_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(str(tmp_path))
    await in_a_completion(store, "c", "rollouts.test_sandboxes:take_forever")
    monkeypatch.setattr(sandboxes_module, "END_TIMEOUT", 0.05)
    await reap_at_end(store, "c")
    assert len(sandbox_keys(store)) == 1


async def test_a_reaper_that_is_too_slow_is_logged_with_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ArtifactStore(str(tmp_path))
    await in_a_completion(store, "c", "rollouts.test_sandboxes:take_forever")
    monkeypatch.setattr(sandboxes_module, "REAP_TIMEOUT", 0.05)
    assert (await reap(store, "c")).failures == [
        "completion c: rollouts.test_sandboxes:take_forever: TimeoutError: "
        "not finished within 0.05 s"
    ]


async def test_a_reaper_that_does_not_exist_is_refused_before_anything_is_made(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(str(tmp_path))
    with pytest.raises(EntrypointError, match="has no 'vanish'"):
        await in_a_completion(store, "c", "support.sandboxes:vanish")
    assert sandbox_keys(store) == []
