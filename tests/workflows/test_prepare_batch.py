"""`prepare_batch`: the sealed batch's advantages, computed once and recorded with the step."""

import asyncio
import threading
from typing import Any

import pytest

from activities import trainer
from everburn.learning.batch import Batch
from everburn.records.ids import GroupKey
from everburn.trainers.protocol import TrainerStateLostError
from everburn.usercode import limits
from support.farm import Start
from support.script import Draw, Script
from support.waiting import PATIENCE, Gate, until

LOST = TrainerStateLostError("the service restarted")


class ByTurns:
    """Advantages by row, from one forward request; records the batches."""

    def __init__(self, *, scale: float = 1.0) -> None:
        self.batches: list[Batch] = []
        self.scale = scale

    async def __call__(self, batch: Batch) -> list[list[list[float]]]:
        self.batches.append(batch)
        await batch.logprobs([[1, 2, 3] for _ in batch.groups])
        return [
            [[self.scale * (group.cursor + 1)] for _ in group.completions] for group in batch.groups
        ]

    @property
    def rows(self) -> list[list[int]]:
        return [[group.cursor for group in batch.groups] for batch in self.batches]


async def equal(draw: Draw) -> float:
    return 1.0


async def test_a_sealed_batch_is_prepared_before_anything_is_sent(start: Start):
    late = Gate()

    async def play(draw: Draw) -> float:
        if draw.place == (1, 1):
            await late.passed()
        return 1.0  # equal rewards: the usual advantages would be zero

    prepare = ByTurns()
    run = await start(Script(play, prepare=prepare), rows=4, prompt_groups_per_step=2)
    await run.until(groups_ready=1)
    assert run.trainer.count("forward") == 0
    late.open()
    await run.result()

    assert prepare.rows == [[0, 1], [2, 3]]
    assert [call for call in run.trainer.calls if call.startswith(("forward", "optim"))] == [
        "forward 2",
        "forward_backward 4",
        "optim_step",
        "forward 2",
        "forward_backward 4",
        "optim_step",
    ]
    advantages = [[d.advantages.tolist() for d in datums] for datums in run.trainer.datums]
    assert advantages == [
        [[1.0, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0]],
        [[3.0, 3.0], [3.0, 3.0], [4.0, 4.0], [4.0, 4.0]],
    ]
    first = run.ledger[0]
    assert first.prepared is not None
    assert first.prepared.groups == first.groups == [GroupKey(cursor=0), GroupKey(cursor=1)]
    assert first.prepared.datums == 4
    record = run.metrics()[-1]
    assert (record["rollout/kept_groups"], record["rollout/datums"]) == (2, 4)
    assert record["perf/prepare_batch_time"] >= 0


async def test_a_repeated_step_uses_the_recorded_advantages(start: Start):
    prepare = ByTurns()
    run = await start(Script(equal, prepare=prepare), rows=3)
    run.trainer.fail_once("optim_step", LOST, after=1)
    await run.result()

    # Step 1 was replayed and step 2 repeated: neither called the function or scored again.
    assert prepare.rows == [[0], [1], [2]]
    assert run.trainer.count("forward ") == 3
    assert [entry.lease_epoch for entry in run.ledger] == [1, 2, 2]
    sent = [datums[0].advantages[0] for datums in run.trainer.datums]
    assert sent == [1.0, 2.0, 1.0, 2.0, 3.0]


async def test_a_session_lost_while_scoring_is_replaced_despite_the_function(
    start: Start,
):
    prepare = ByTurns()

    async def careless(batch: Batch) -> Any:
        try:
            return await prepare(batch)
        except Exception:
            return "nothing that could be trained on"

    run = await start(Script(equal, prepare=careless), rows=1)
    run.trainer.fail_once("forward ", LOST)
    await run.result()

    assert prepare.rows == [[0], [0]]
    assert [entry.lease_epoch for entry in run.ledger] == [2]


async def test_a_batch_without_any_advantage_is_a_step_without_update(start: Start):
    run = await start(Script(prepare=ByTurns(scale=0.0)), rows=2)
    result = await run.result()

    assert (result.steps, result.version) == (2, 2)
    assert [entry.updated for entry in run.ledger] == [False, False]
    assert run.trainer.count("forward_backward") == 0


async def test_groups_without_any_advantage_are_left_out(start: Start):
    def second_only(batch: Batch) -> Any:
        return [[[float(group.cursor)]] * 2 for group in batch.groups]

    run = await start(Script(equal, prepare=second_only), rows=2, prompt_groups_per_step=2)
    await run.result()

    (entry,) = run.ledger
    assert entry.prepared is not None and entry.prepared.groups == [GroupKey(cursor=1)]
    assert run.trainer.calls.count("forward_backward 2") == 1
    assert run.metrics()[-1]["rollout/kept_groups"] == 1


async def test_a_function_that_fails_ends_the_run_and_says_where(start: Start):
    def broken(batch: Batch) -> Any:
        raise KeyError("ground_truth")

    run = await start(Script(prepare=broken), rows=1)
    failure = await run.failure()
    assert failure.type == "KeyError"
    assert f"run {run.id} · step 1 · support.tasks:prepare: KeyError" in failure.message
    assert run.trainer.count("forward_backward") == 0


@pytest.mark.parametrize("blocks", [False, True], ids=["it awaits", "it blocks its thread"])
async def test_a_function_that_never_returns_ends_only_its_run_and_is_named(
    start: Start, monkeypatch: pytest.MonkeyPatch, blocks: bool
):
    begun, free = threading.Event(), threading.Event()

    async def stuck(batch: Batch) -> Any:
        begun.set()
        if blocks:
            free.wait(60)
        await asyncio.Event().wait()

    monkeypatch.setattr(limits, "LIMIT", 1.0)
    run = await start(Script(equal, prepare=stuck), rows=1)
    await until(begun.is_set)
    try:
        monkeypatch.setattr(limits, "LIMIT", PATIENCE)
        other = await start(Script(equal, prepare=ByTurns()), rows=1)
        await other.result()
        failure = await run.failure()
    finally:
        free.set()
    assert failure.type == "UserCodeStuckError"
    where = f"run {run.id} · step 1 · support.tasks:prepare: UserCodeStuckError"
    assert f"{where}: it hasn't returned within" in failure.message
    assert [run.trainer.count("open"), run.trainer.count("forward_backward")] == [1, 0]


async def test_a_run_has_one_user_loop_for_all_its_leases(
    start: Start, monkeypatch: pytest.MonkeyPatch
):
    """A client that the function has opened belongs to its loop."""
    threads: list[threading.Thread] = []

    def prepare(batch: Batch) -> Any:
        threads.append(threading.current_thread())
        return [[[1.0], [2.0]]]

    run = await start(Script(equal, prepare=prepare), rows=2)
    run.trainer.fail_once("optim_step", LOST)
    await run.result()
    assert [entry.lease_epoch for entry in run.ledger] == [2, 2]
    first, *others = threads
    assert others and all(thread is first for thread in others)
    assert first.is_alive()

    async def is_closed() -> bool:
        """The loop is closed by the next run that exceeds the limit, once the first lease has
        ended."""
        next_run = await start(Script(equal, prepare=ByTurns()), rows=1)
        await next_run.result()
        return not first.is_alive()

    monkeypatch.setattr(trainer, "MAX_IDLE_LOOPS", 0)
    await until(is_closed)


async def test_a_result_of_the_wrong_shape_ends_the_run_and_says_where(start: Start):
    run = await start(Script(prepare=lambda batch: [[[1.0]]]), rows=1)
    failure = await run.failure()
    assert failure.type == "InvalidBatchError"
    assert "step 1 · row 0: prepare_batch returned 1 item(s) for 2 completions" in failure.message


async def test_a_function_that_cannot_be_imported_costs_no_session(start: Start):
    run = await start(Script(), rows=1, prepare_batch="support.tasks:no_such_function")
    failure = await run.failure()
    assert failure.type == "EntrypointError"
    assert "has no 'no_such_function'" in failure.message
    assert run.trainer.calls == []
