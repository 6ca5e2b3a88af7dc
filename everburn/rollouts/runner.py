"""Running rollout functions: one runner per process and run.

Owns which row a completion gets, its context parameters, and its name in the store and in messages.
Doesn't own one attempt at it (attempt.py), retries (the PromptGroup workflow), the loop it runs on
(usercode/loop.py), or the result of a group (learning/group.py).
"""

import itertools
from functools import cached_property
from typing import Any

from everburn.records.ids import GroupKey, RolloutOutcome, RunRef
from everburn.records.keys import (
    EVALUATION_ROWS_KEY,
    ROWS_KEY,
    completion_name,
    evaluation_name,
)
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from everburn.rollouts.attempt import RolloutAttempt
from everburn.rollouts.contract import RolloutFn, RolloutRun
from everburn.rollouts.dataset import Row, RowOrder, stored_rows
from everburn.rollouts.destinations import EvaluationCall, HeldOutRow, TrainingRollout
from everburn.rollouts.function import RolloutFunction
from everburn.rollouts.reuse import EarlierAttempts
from everburn.rollouts.sampling import CompletionScope
from everburn.usercode.threads import to_thread


class RolloutRunner:
    """The completions of one run in this process."""

    def __init__(self, run: RunRef) -> None:
        self.run = run
        self.store = ArtifactStore.of(run)
        self.config = stored_config(run)
        self._function = RolloutFunction(self.config, self.store)
        self._earlier = EarlierAttempts(self.store)

    async def complete(
        self, group: GroupKey, completion: int, version: int, retry: int = 0
    ) -> RolloutOutcome:
        """Run one completion of a row, unless an earlier attempt has finished it.

        Its status is "succeeded", or "dropped" if the function returned None. retry: earlier
        attempts at it.

        Raises:
            InvalidRolloutError, TimeoutError, StoreError, and whatever the function raises.
        """
        position = self.order.position(group.cursor)
        scope = CompletionScope(
            f"run {self.run.id} · row {group.cursor} · completion {completion}",
            version,
            run=self.run.id,
            name=completion_name(group, completion),
            retry=retry,
        )
        context = {
            "cursor_index": group.cursor,
            "row_index": position.row_index,
            "epoch": position.epoch,
            "rollout_idx": completion,
            "sample_index": group.cursor * self.config.completions_per_prompt + completion,
            "end_of_epoch": position.end_of_epoch,
            "evaluation": False,
        }
        earlier = await to_thread(self._earlier.unused, group)
        destination = TrainingRollout(self.store, group, completion, version, position, earlier)
        attempt = RolloutAttempt(self._function, scope, destination)
        return await attempt.run(self._rows[position.row_index], context)

    async def evaluate(self, index: int, version: int, retry: int = 0) -> dict[str, Any]:
        """Evaluate one held-out row under a policy version, unless an earlier attempt has. Returns
        its sample.

        Raises:
            InvalidRolloutError, TimeoutError, StoreError, and whatever the function raises.
        """
        scope = self._evaluation_scope(self.held_out(index), version, f"row-{index}", retry)
        destination = HeldOutRow(self.store, version, index)
        attempt = RolloutAttempt(self._function, scope, destination)
        return await attempt.run(self._evaluation_rows[index], _evaluation_context(index))

    def held_out(self, index: int) -> str:
        """The name of a held-out row in messages."""
        return f"run {self.run.id} · evaluation row {index}"

    def evaluation_rollout_fn(self, version: int, retry: int = 0) -> RolloutFn:
        """The rollout function as an evaluation function calls it: pinned to a version.

        It takes a row, and optionally context parameters, which replace the default ones of the
        held-out row of that number. retry: earlier attempts at the evaluation, whose recorded
        sampling calls are used again.
        """
        numbers = itertools.count()

        async def rollout_fn(sample_prompt: Row, **context: Any) -> RolloutRun | None:
            number = next(numbers)
            where = f"run {self.run.id} · evaluation call {number}"
            scope = self._evaluation_scope(where, version, f"call-{number}", retry)
            attempt = RolloutAttempt(self._function, scope, EvaluationCall(version, number))
            return await attempt.run(sample_prompt, _evaluation_context(number) | context)

        return rollout_fn

    def _evaluation_scope(self, where: str, version: int, part: str, retry: int) -> CompletionScope:
        return CompletionScope(
            where,
            version,
            self.config.evaluation_temperature,
            run=self.run.id,
            name=evaluation_name(version, part),
            retry=retry,
        )

    @property
    def order(self) -> RowOrder:
        return RowOrder(len(self._rows), self.config.shuffle, self.config.seed)

    def row(self, cursor: int) -> Row:
        """The dataset row that a cursor points at."""
        return self._rows[self.order.position(cursor).row_index]

    def close(self) -> None:
        """Close the sampler's connections."""
        self._function.sampler.close()

    @cached_property
    def _rows(self) -> list[Row]:
        return stored_rows(self.run, ROWS_KEY)

    @cached_property
    def _evaluation_rows(self) -> list[Row]:
        return stored_rows(self.run, EVALUATION_ROWS_KEY)


def _evaluation_context(index: int) -> dict[str, Any]:
    """The context parameters of a held-out row, which has one completion."""
    return {
        "cursor_index": index,
        "row_index": index,
        "epoch": 0,
        "rollout_idx": 0,
        "sample_index": index,
        "end_of_epoch": False,
        "evaluation": True,
    }
