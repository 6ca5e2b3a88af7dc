"""Calibration: one batch from the initial policy, and whether there is anything to learn from it.

Owns the figures and what follows from them. Samples as a run does, by the real trainer session,
sampler and rollout function; trains nothing, and leaves nothing at the service. Doesn't own a run's
course: what a run would try again is a failure here.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from everburn.config import RunConfig
from everburn.learning.advantages import sample_std
from everburn.learning.rollout_file import CompletionRecord, read_rollout
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import rollout_key
from everburn.records.publications import Publication, publish
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.rollouts.failures import classify, decisive_error
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.task import prepare_task
from everburn.trainers.protocol import Trainer
from everburn.usercode.threads import in_thread

SNAPSHOT = "calibrate"
MANY_AT_LIMIT = 0.25
"""Share of completions cut off, from which on the limit is worth a word."""


class CalibrationFailedError(Exception):
    """Rollouts failed where the configuration takes no failure."""


@dataclass(frozen=True)
class Draw:
    """One completion, its reward, and what a person wants to read of it."""

    record: CompletionRecord
    reward: float


@dataclass(frozen=True)
class Calibration:
    """What a batch of G completions of each row came to.

    groups: the completions that succeeded, by row. failures: why others didn't. dropped: how
    often the rollout function returned None.
    """

    config: RunConfig
    groups: list[list[Draw]]
    failures: list[str]
    dropped: int

    @property
    def draws(self) -> list[Draw]:
        return [draw for group in self.groups for draw in group]

    @property
    def asked(self) -> int:
        return len(self.groups) * self.config.completions_per_prompt

    @property
    def reward_mean(self) -> float:
        return _mean([draw.reward for draw in self.draws])

    @property
    def reward_std_within_group(self) -> float:
        """Mean over rows of the sample deviation: the spread that GRPO trains on. A row whose
        completions all got the same reward counts 0; one with fewer than two doesn't count."""
        return _mean([sample_std(rewards) for rewards in self._judged])

    @property
    def flat_groups(self) -> int:
        """Rows that train nothing: the rewards of their two or more completions are alike."""
        return sum(len(set(rewards)) == 1 for rewards in self._judged)

    @property
    def at_token_limit(self) -> int:
        return sum(draw.record.at_token_limit for draw in self.draws)

    @property
    def output_tokens(self) -> list[int]:
        return [draw.record.output_tokens for draw in self.draws]

    @property
    def _judged(self) -> list[list[float]]:
        """Rewards of the rows that could train anything."""
        rewards = [[draw.reward for draw in group] for group in self.groups]
        return [group for group in rewards if len(group) > 1]

    def advice(self) -> list[str]:
        """What to change before training; nothing where the batch has enough signal."""
        if not self.draws:
            return ["no completion succeeded: see why, and mend that first"]
        notes = []
        if self.at_token_limit >= MANY_AT_LIMIT * len(self.draws):
            notes.append(
                f"{self.at_token_limit} of {len(self.draws)} completions were cut off at "
                f"max_completion_tokens={self.config.max_completion_tokens}: unless learning to be "
                "brief is the task, raise it"
            )
        if not self._judged:
            notes.append(
                f"no row has two completions to compare: {self.asked - len(self.draws)} of "
                f"{self.asked} failed or were dropped; see why, and mend that first"
            )
        elif self.flat_groups == len(self._judged):
            notes += self._without_signal()
        elif self.flat_groups > len(self._judged) / 2:
            notes.append(
                f"{self.flat_groups} of {len(self._judged)} rows train nothing: more completions "
                "per row (completions_per_prompt), or rows nearer to what the policy can just do, "
                "give more signal for the same price"
            )
        return notes

    def _without_signal(self) -> list[str]:
        notes = ["no signal: all completions of each row got the same reward"]
        rewards = {draw.reward for draw in self.draws}
        if self.config.temperature == 0:
            notes.append("temperature is 0, which makes them alike: train at 1.0")
        elif len(rewards) > 1:
            notes.append(
                "rows are either too easy or too hard: choose those in between, or raise "
                "completions_per_prompt"
            )
        elif max(rewards) > 0:
            notes.append(f"every completion got {max(rewards):g}: make the task harder")
        else:
            notes.append(
                "no completion got a reward: make the task easier, reward partial success, or give "
                "more room (max_completion_tokens); and see in the samples whether the grader is "
                "right"
            )
        return notes


async def calibrate(
    run: RunRef, config: RunConfig, open_trainer: Callable[[RunConfig], Awaitable[Trainer]]
) -> Calibration:
    """Roll out G completions of the first P rows under the initial policy.

    run: names a new folder for the rollouts. Rows are taken in the run's order.

    Raises:
        CalibrationFailedError: see `on_any_rollout_failure`.
        What preparing a task, opening a trainer, and rollouts raise that is fatal.
    """
    create_run_folder(run, config, Owner(chain=SNAPSHOT))
    task = await in_thread(lambda: prepare_task(run))
    runner = RolloutRunner(run)
    try:
        trainer = await open_trainer(config)
        try:
            snapshot = await trainer.publish(SNAPSHOT)
            record = Publication(version=0, epoch=1, snapshot=snapshot.path, handle=snapshot.handle)
            publish(ArtifactStore.of(run), record)
            return await _roll_out(runner, min(config.prompt_groups_per_step, task.rows))
        finally:
            await trainer.close()
    finally:
        runner.close()


async def _roll_out(runner: RolloutRunner, rows: int) -> Calibration:
    config = runner.config
    count = rows * config.completions_per_prompt
    slots = asyncio.Semaphore(config.max_concurrency_rollout_sample or count)

    async def draw(cursor: int, completion: int) -> Draw | str | None:
        """The completion, why it failed, or None if it was dropped."""
        group = GroupKey(cursor=cursor)
        async with slots:
            try:
                outcome = await runner.complete(group, completion, version=0)
            except Exception as error:
                if classify(error) == "fatal" and config.on_any_rollout_failure != "fail":
                    raise
                told = decisive_error(error)
                return f"{type(told).__name__}: {told}"
        if outcome.status == "dropped":
            return None
        found, run = read_rollout(runner.store, rollout_key(group, completion))
        return Draw(found, float(run.segments[0].reward))

    tasks = [
        asyncio.create_task(draw(cursor, completion))
        for cursor in range(rows)
        for completion in range(config.completions_per_prompt)
    ]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # They use the sampler and the session until they have ended.
        await asyncio.gather(*tasks, return_exceptions=True)
    failures = [result for result in results if isinstance(result, str)]
    if failures and config.on_any_rollout_failure == "fail":
        raise CalibrationFailedError(
            f"{len(failures)}/{count} rollouts failed during {SNAPSHOT}: {failures[0]}"
        )
    by_row = [
        results[start : start + config.completions_per_prompt]
        for start in range(0, count, config.completions_per_prompt)
    ]
    return Calibration(
        config,
        [[result for result in row if isinstance(result, Draw)] for row in by_row],
        failures,
        dropped=results.count(None),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
