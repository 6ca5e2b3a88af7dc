"""How errors of user code reach Temporal: with type, place and a readable message."""

import asyncio
import importlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError

from activities.failure_types import FailureKind
from activities.messages import Prepared, RolloutOrder, RowsFailed, ShardOrder
from activities.rollouts import RolloutActivities
from everburn import RecoverableRolloutError
from everburn.records.ids import GroupKey, RolloutOutcome, RunRef
from everburn.records.store import ArtifactStore
from everburn.rollouts.failures import SnapshotGoneError
from everburn.rollouts.sandboxes import Sandboxes, sandbox_keys
from support.activities import execute
from support.script import Draw, spread
from support.scripted_run import scripted_run
from support.threads import hanging
from support.waiting import Gate

WHERE = "run scripted · row 0 · completion 1"


class Worker:
    """A rollout worker's activities without a worker, since the tests need no server."""

    def __init__(self, client: Client) -> None:
        self.activities = RolloutActivities(client)

    async def prepare_task(self, run: RunRef) -> Prepared:
        prepared: Prepared = await execute(self.activities.prepare_task, run)
        return prepared

    async def rollout(self, run: RunRef) -> RolloutOutcome:
        order = RolloutOrder(run=run, group=GroupKey(cursor=0), completion=1, version=0, retry=0)
        outcome: RolloutOutcome = await execute(self.activities.rollout, order)
        return outcome

    async def evaluate_shard(self, run: RunRef, start: int, stop: int) -> None:
        order = ShardOrder(run=run, incarnation=0, version=0, shard=0, start=start, stop=stop)
        await execute(self.activities.evaluate_shard, order)

    async def failure(self, run: RunRef) -> ApplicationError:
        with pytest.raises(ApplicationError) as caught:
            await self.rollout(run)
        return caught.value


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    worker = Worker(await Client.connect("127.0.0.1:9", lazy=True))
    yield worker
    worker.activities.close()


@pytest.mark.parametrize(
    ("members", "kind", "text"),
    [
        (
            [SnapshotGoneError("version 0 isn't served")],
            FailureKind.SNAPSHOT_GONE,
            "version 0 isn't served",
        ),
        (
            [SnapshotGoneError("v"), RecoverableRolloutError("asleep")],
            FailureKind.RECOVERABLE,
            "asleep",
        ),
        ([RecoverableRolloutError("asleep"), KeyError("answer")], "KeyError", "'answer'"),
    ],
)
async def test_an_error_of_parallel_calls_is_reported_like_a_single_error(
    worker: Worker, tmp_path: Path, members: list[Exception], kind: str, text: str
) -> None:
    async def play(draw: Draw) -> Any:
        raise ExceptionGroup("unhandled errors in a TaskGroup", members)

    failure = await worker.failure(scripted_run(tmp_path, play))
    assert failure.type == kind
    name = type(members[-1]).__name__
    assert failure.message == f"{WHERE}: {name}: {text}"
    assert failure.__cause__ is members[-1]


async def test_a_missed_deadline_is_reported_with_its_name_and_place(
    worker: Worker, tmp_path: Path
) -> None:
    async def play(draw: Draw) -> float:
        await asyncio.Event().wait()
        return 1.0

    failure = await worker.failure(scripted_run(tmp_path, play, rollout_timeout=0.05))
    assert failure.type == FailureKind.RECOVERABLE
    assert failure.message == f"{WHERE}: TimeoutError: not finished within rollout_timeout (0.05 s)"


async def test_a_completion_that_cancels_itself_is_reported_with_its_place(
    worker: Worker, tmp_path: Path
) -> None:
    async def play(draw: Draw) -> float:
        raise asyncio.CancelledError

    failure = await worker.failure(scripted_run(tmp_path, play))
    assert failure.type == "SelfCancelledError"
    assert failure.message.startswith(f"{WHERE}: SelfCancelledError: it raised CancelledError")


async def test_a_held_out_row_that_fails_is_named(worker: Worker, tmp_path: Path) -> None:
    async def play(draw: Draw) -> float:
        if draw.row == 3:
            raise KeyError(draw.prompt["row"])
        return 1.0

    run = scripted_run(tmp_path, play, count=5)
    with pytest.raises(ApplicationError) as caught:
        await worker.evaluate_shard(run, 1, 5)
    assert caught.value.type == "KeyError"
    assert caught.value.message == "run scripted · evaluation row 3: KeyError: 3"
    assert caught.value.details == (RowsFailed(failed=1),)


async def test_code_that_fills_its_thread_pool_delays_no_other_completion(
    worker: Worker, tmp_path: Path
) -> None:
    """User code fills the threads of asyncio.to_thread: Everburn's own code must not need them."""
    (tmp_path / "rows.jsonl").write_text("{}\n")

    async def play(draw: Draw) -> float:
        user_code.take_all()
        await Sandboxes(ArtifactStore.of(run)).register("builtins:dict")
        return 1.0

    run = scripted_run(tmp_path, play, dataset=str(tmp_path / "rows.jsonl"))
    with hanging() as user_code:
        async with asyncio.timeout(20):
            assert (await worker.rollout(run)).status == "succeeded"
            await worker.evaluate_shard(run, 0, 1)
            await worker.prepare_task(run)


reaping, reaped = threading.Event(), threading.Event()


def reap_slowly() -> None:
    reaping.set()
    time.sleep(0.2)
    reaped.set()


@pytest.mark.parametrize("late", [False, True])
async def test_a_worker_that_ends_reaps_the_sandboxes_of_its_rollouts(
    worker: Worker, tmp_path: Path, late: bool
) -> None:
    """Rollouts are cancelled after the grace period; the process ends when it is joined.
    late: the cancellation arrives while the sandboxes are reaped."""
    reaping.clear(), reaped.clear()

    async def play(draw: Draw) -> float:
        await Sandboxes(ArtifactStore.of(run)).register(f"{__name__}:reap_slowly")
        begun.open()
        if not late:
            await asyncio.Event().wait()
        return 1.0

    begun, run = Gate(), scripted_run(tmp_path, play)
    rollout = asyncio.create_task(worker.rollout(run))
    await begun.passed()
    if late:
        assert await asyncio.to_thread(reaping.wait, 10)
    rollout.cancel()
    await asyncio.wait([rollout])
    worker.activities.close()
    assert await asyncio.to_thread(worker.activities.join, 10)
    assert reaped.is_set()
    assert sandbox_keys(ArtifactStore.of(run)) == []


async def test_a_store_failure_is_reported_as_such_and_a_corrupt_file_by_name(
    worker: Worker, tmp_path: Path
) -> None:
    run = scripted_run(tmp_path, spread)
    rows = Path(run.folder) / "rows.jsonl"
    rows.rename(rows.with_suffix(".aside"))
    rows.mkdir()
    failure = await worker.failure(run)
    assert failure.type == FailureKind.STORE and "rows.jsonl: Is a directory" in failure.message
    rows.rmdir()
    rows.write_text('{"row": 0')
    failure = await worker.failure(run)
    assert failure.type == "CorruptArtifactError"
    assert failure.message.startswith(f"{WHERE}: CorruptArtifactError: {rows} isn't JSON")


def run_of_code(folder: Path, module: str, code: str, **fields: Any) -> RunRef:
    """A run with this code as its rollout factory."""
    (folder / f"{module}.py").write_text(code)
    return scripted_run(folder, spread, rollout=f"{module}:make_rollout_fn", **fields)


async def test_any_error_while_importing_user_code_makes_a_worker_unfit(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of_code(tmp_path, "asks_a_service", "raise ConnectionRefusedError('no database')")
    failure = await worker.failure(run)
    assert failure.type == FailureKind.WORKER_UNFIT and "no database" in failure.message


NEEDS_A_LOOP = """
import asyncio
from everburn import RolloutRun, RolloutSample

made = []

def make_rollout_fn(setup):
    made.append(asyncio.get_running_loop())

    async def rollout_fn(sample_prompt):
        assert asyncio.get_running_loop() is made[0]
        return RolloutRun([RolloutSample.of_turn([1], [2], [-1.0], 1.0)])

    return rollout_fn
"""


async def test_the_rollout_function_is_made_once_on_its_own_loop(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that belongs to a loop can be made there, and is closed with it."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = str(tmp_path / "rows.jsonl")
    run = run_of_code(tmp_path, "needs_a_loop", NEEDS_A_LOOP, dataset=rows)
    assert (await worker.prepare_task(run)).rows == 1
    assert (await worker.rollout(run)).status == "succeeded"
    assert len(importlib.import_module("needs_a_loop").made) == 1


async def test_a_rollout_factory_that_raises_fails_the_preparation(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    run = run_of_code(tmp_path, "wants_more", "def make_rollout_fn(setup): setup.extras['model']")
    with pytest.raises(ApplicationError, match="'model'") as caught:
        await worker.prepare_task(run)
    assert caught.value.type == "KeyError" and caught.value.non_retryable
