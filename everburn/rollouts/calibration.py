"""Calibration: one batch from the initial policy, and whether it has a training signal.

Owns the figures and the advice. Samples with the real trainer session, sampler and rollout
function, trains nothing, and leaves nothing at the service. Doesn't retry: a failure that a run
would retry is a failure here.
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
"""Share of truncated completions at which the advice mentions the limit."""


class CalibrationFailedError(Exception):
    """Rollouts failed, and `on_any_rollout_failure` is "fail"."""


@dataclass(frozen=True)
class Rollout:
    """One completion and its reward."""

    record: CompletionRecord
    reward: float


@dataclass(frozen=True)
class Calibration:
    """The results of a batch of G completions per row.

    groups: the successful completions, by row. failures: the error texts of others. dropped: how
    often the rollout function returned None.
    """

    config: RunConfig
    groups: list[list[Rollout]]
    failures: list[str]
    dropped: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group]

    @property
    def asked(self) -> int:
        return len(self.groups) * self.config.completions_per_prompt

    @property
    def reward_mean(self) -> float:
        return _mean([rollout.reward for rollout in self.rollouts])

    @property
    def reward_std_within_group(self) -> float:
        """Mean over rows of the sample standard deviation, on which GRPO trains. A row whose
        completions all have the same reward counts as 0; one with fewer than two is left out."""
        return _mean([sample_std(rewards) for rewards in self._judged])

    @property
    def flat_groups(self) -> int:
        """Rows that train nothing: all their rewards (at least two) are equal."""
        return sum(len(set(rewards)) == 1 for rewards in self._judged)

    @property
    def at_token_limit(self) -> int:
        return sum(rollout.record.at_token_limit for rollout in self.rollouts)

    @property
    def output_tokens(self) -> list[int]:
        return [rollout.record.output_tokens for rollout in self.rollouts]

    @property
    def _judged(self) -> list[list[float]]:
        """Rewards of the rows with at least two completions."""
        rewards = [[rollout.reward for rollout in group] for group in self.groups]
        return [group for group in rewards if len(group) > 1]

    def advice(self) -> list[str]:
        """What to change before training; empty if the batch has enough signal."""
        if not self.rollouts:
            return ["no completion succeeded: fix that first"]
        notes = []
        if self.at_token_limit >= MANY_AT_LIMIT * len(self.rollouts):
            notes.append(
                f"{self.at_token_limit} of {len(self.rollouts)} completions were cut off at "
                f"max_completion_tokens={self.config.max_completion_tokens}: unless learning to be "
                "brief is the task, raise it"
            )
        if not self._judged:
            notes.append(
                f"no row has two completions to compare: {self.asked - len(self.rollouts)} of "
                f"{self.asked} failed or were dropped: fix that first"
            )
        elif self.flat_groups == len(self._judged):
            notes += self._without_signal()
        elif self.flat_groups > len(self._judged) / 2:
            notes.append(
                f"{self.flat_groups} of {len(self._judged)} rows train nothing: more completions "
                "per row (completions_per_prompt), or rows that the policy can just solve, "
                "give more signal for the same price"
            )
        return notes

    def _without_signal(self) -> list[str]:
        notes = ["no signal: all completions of each row got the same reward"]
        rewards = {rollout.reward for rollout in self.rollouts}
        if self.config.temperature == 0:
            notes.append("temperature is 0, which makes them equal: train at 1.0")
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

    run: a new folder for the rollouts. Rows are taken in the run's order.

    Raises:
        CalibrationFailedError, and fatal errors of the task's preparation, of the trainer and of
        rollouts.
    """
    create_run_folder(run, config, Owner(first_execution_id=SNAPSHOT))
    task = await in_thread(lambda: prepare_task(run))
    runner = RolloutRunner(run)
    try:
        trainer = await open_trainer(config)
        try:
            snapshot = await trainer.publish(SNAPSHOT)
            record = Publication(
                incarnation=0,
                lease_epoch=1,
                version=0,
                snapshot=snapshot.path,
                handle=snapshot.handle,
            )
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

    async def roll_out(cursor: int, completion: int) -> Rollout | str | None:
        """The completion, why it failed, or None if it was dropped."""
        group = GroupKey(cursor=cursor)
        async with slots:
            try:
                outcome = await runner.complete(group, completion, version=0)
            except Exception as error:
                if classify(error) == "fatal" and config.on_any_rollout_failure != "fail":
                    raise
                cause = decisive_error(error)
                return f"{type(cause).__name__}: {cause}"
        if outcome.status == "dropped":
            return None
        found, run = read_rollout(runner.store, rollout_key(group, completion))
        return Rollout(found, float(run.segments[0].reward))

    tasks = [
        asyncio.create_task(roll_out(cursor, completion))
        for cursor in range(rows)
        for completion in range(config.completions_per_prompt)
    ]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        # Tasks use the sampler and the session until they have ended.
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
        [[result for result in row if isinstance(result, Rollout)] for row in by_row],
        failures,
        dropped=results.count(None),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
