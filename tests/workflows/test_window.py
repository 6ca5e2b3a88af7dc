"""Admission: how far work may run ahead, and how many calls are in flight at once."""

import threading

from support.farm import Start
from support.script import Draw, Script, spread
from support.waiting import Gate, until


class Meter:
    """Counts calls in flight; the first calls wait until `full` of them are in flight."""

    def __init__(self, full: int) -> None:
        self._lock = threading.Lock()
        self._full = full
        self._reached = Gate()
        self.now = self.most = 0

    async def play(self, draw: Draw) -> float:
        self._add(1)
        await self._reached.passed()
        self._add(-1)
        return await spread(draw)

    def _add(self, calls: int) -> None:
        with self._lock:
            self.now += calls
            self.most = max(self.most, self.now)
        if self.most >= self._full:
            self._reached.open()


async def test_with_no_versions_ahead_every_row_is_trained_on_policy(start: Start):
    run = await start(Script(), rows=6, prompt_groups_per_step=2, max_head_offpolicy_versions=0)
    backward = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    status = await run.status()
    assert (status.version, status.staleness_capacity, status.samples_in_flight) == (0, 0, 0)
    assert run.script.rows_begun == {0, 1}

    backward.open()
    await run.result()
    assert [entry.metrics["async/version_offset_max"] for entry in run.ledger] == [0, 0, 0]
    assert {group.key.cursor: group.version for group in run.groups} == {
        row: row // 2 for row in range(6)
    }


async def test_one_version_ahead_admits_one_more_batch_and_no_row_beyond(start: Start):
    run = await start(Script(), rows=6, prompt_groups_per_step=2, max_head_offpolicy_versions=1)
    publish = run.trainer.hold("publish policy-0001")
    await run.trainer.reached("publish policy-0001")
    await until(lambda: len(run.groups) == 4)
    assert run.script.rows_begun == {0, 1, 2, 3}

    publish.open()
    await run.result()
    assert all(entry.metrics["async/version_offset_max"] <= 1 for entry in run.ledger)
    assert [group.version for group in run.groups] == [0, 0, 0, 0, 1, 1]
    assert sorted(run.trained) == [str(row) for row in range(6)]


async def test_rollouts_continue_while_the_trainer_is_busy(start: Start):
    """Strict overlap: while a backward is blocked, a rollout ends and another row takes its
    place."""
    gates = {1: Gate(), 2: Gate(), 3: Gate()}

    async def play(draw: Draw) -> float:
        if draw.row in gates:
            await gates[draw.row].passed()
        return draw.completion

    run = await start(
        Script(play), rows=4, max_head_offpolicy_versions=3, max_concurrency_rollout_sample=4
    )
    backward = run.trainer.hold("forward_backward")
    await run.trainer.reached("forward_backward")
    await until(lambda: run.script.rows_begun == {0, 1, 2})

    gates[1].open()
    await until(lambda: run.script.rows_begun == {0, 1, 2, 3})
    assert run.trainer.finished[-1] == "publish policy-0000-e1"
    assert (await run.status()).version == 0

    for gate in (backward, gates[2], gates[3]):
        gate.open()
    await run.result()
    last = run.metrics("producer/event")[-1]
    assert last["producer/completion_refill_rows_submitted_total"] == 2
    assert last["producer/completion_refill_attempts_total"] >= 4


async def test_calls_in_flight_never_exceed_their_limit(start: Start):
    meter = Meter(full=6)
    run = await start(
        Script(meter.play),
        rows=8,
        completions_per_prompt=3,
        prompt_groups_per_step=4,
        max_head_offpolicy_versions=1,
        max_concurrency_rollout_sample=7,
    )
    result = await run.result()
    assert result.rows == 8
    assert 6 <= meter.most <= 7
    assert all(record["async/in_flight_samples_mean"] <= 7 for record in run.metrics())
    assert all("async/concurrency_capacity_samples_mean" in record for record in run.metrics())


async def test_a_row_uses_free_call_slots_before_the_other_groups_have_ended(start: Start):
    slow = Gate()

    async def play(draw: Draw) -> float:
        if draw.completion == 2 and draw.row < 3:
            await slow.passed()
        return draw.completion

    run = await start(
        Script(play),
        rows=4,
        completions_per_prompt=3,
        prompt_groups_per_step=4,
        max_concurrency_rollout_sample=9,
    )
    await until(lambda: run.script.rows_begun == {0, 1, 2, 3})
    # Only row 3 may have ended: it used the slots of three of the six calls that have ended.
    assert {group.key.cursor for group in run.groups} <= {3}
    slow.open()
    await run.result()
    assert run.trained == ["0", "1", "2", "3"]


async def test_a_concurrency_limit_that_can_never_fill_is_reported(start: Start):
    run = await start(Script(), rows=1, max_concurrency_rollout_sample=6)
    await run.result()
    (note,) = (await run.status()).notes
    assert "max_concurrency_rollout_sample=6 can never fill" in note
    assert "max_head_offpolicy_versions >= 2" in note
