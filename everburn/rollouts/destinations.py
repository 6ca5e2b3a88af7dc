"""Where results of completions are written: training rollouts, held-out rows, evaluation calls.

Owns what is written for each, and what the caller receives. Doesn't own when (attempt.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everburn.learning.rollout_file import CompletionRecord, read_rollout, write_rollout
from everburn.records.ids import GroupKey, RolloutOutcome
from everburn.records.keys import (
    call_log_key,
    evaluation_log_key,
    evaluation_row_key,
    rollout_key,
)
from everburn.records.store import ArtifactStore
from everburn.rollouts.attempt import FinishedRollout
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.dataset import Position
from everburn.rollouts.sampling import CompletionScope


@dataclass(frozen=True, slots=True)
class TrainingRollout:
    """A completion of a prompt group. earlier: attempts at the row whose rollouts are unused, the
    newest first (reuse.py)."""

    store: ArtifactStore
    group: GroupKey
    completion: int
    version: int
    position: Position
    earlier: Sequence[GroupKey]

    def log_keys(self) -> list[str]:
        own, *earlier = (call_log_key(g, self.completion) for g in (self.group, *self.earlier))
        return [own, *filter(self.store.exists, earlier)]

    def find(self) -> RolloutOutcome | None:
        """Copies a rollout of an earlier group, with this one's attempt and version; the sampled
        versions stay recorded."""
        own, *earlier = (rollout_key(g, self.completion) for g in (self.group, *self.earlier))
        if not self.store.exists(own):
            found = next(filter(self.store.exists, earlier), None)
            if found is None:
                return None
            record, run = read_rollout(self.store, found)
            stamp = {
                "attempt": self.group.attempt,
                "incarnation": self.group.incarnation,
                "version": self.version,
            }
            write_rollout(self.store, own, record.model_copy(update=stamp), run)
        return RolloutOutcome(completion=self.completion, status="succeeded", reused=True)

    def write(self, scope: CompletionScope, rollout: FinishedRollout | None) -> RolloutOutcome:
        if rollout is not None:
            key = rollout_key(self.group, self.completion)
            write_rollout(self.store, key, self._record(scope, rollout), rollout.run)
        scope.delete_log()
        return RolloutOutcome(
            completion=self.completion,
            status="dropped" if rollout is None else "succeeded",
            reused=scope.reused_calls > 0,
        )

    def _record(self, scope: CompletionScope, rollout: FinishedRollout) -> CompletionRecord:
        return CompletionRecord(
            run=scope.run,
            cursor=self.group.cursor,
            row_index=self.position.row_index,
            epoch=self.position.epoch,
            attempt=self.group.attempt,
            incarnation=self.group.incarnation,
            completion=self.completion,
            version=self.version,
            versions=[sample.version for sample in scope.calls],
            at_token_limit=scope.at_token_limit,
            output_tokens=scope.output_tokens,
            prompt=rollout.prompt,
            answer=rollout.answer,
            info=rollout.info,
            seconds=rollout.seconds,
        )


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """The sample of one held-out row, as evaluation files hold it."""

    store: ArtifactStore
    version: int
    index: int

    def log_keys(self) -> list[str]:
        return [evaluation_log_key(self.version, f"row-{self.index}")]

    def find(self) -> dict[str, Any] | None:
        return self.store.find_json(evaluation_row_key(self.version, self.index))

    def write(self, scope: CompletionScope, rollout: FinishedRollout | None) -> dict[str, Any]:
        """Raises ValueError if the function dropped the completion."""
        if rollout is None:
            raise ValueError(f"{scope.where}: the rollout function returned None")
        sample = {
            "prompt": rollout.prompt,
            "reward": float(rollout.run.segments[0].reward),
            "info": rollout.info,
            "answer": rollout.answer,
            "output_tokens": scope.output_tokens,
            "at_token_limit": scope.at_token_limit,
        }
        self.store.put_json(evaluation_row_key(self.version, self.index), sample, once=True)
        scope.delete_log()
        return sample


@dataclass(frozen=True, slots=True)
class EvaluationCall:
    """A call by the user's evaluation function, to which the rollout is returned. The call log
    stays until the function's figures are written (evaluation.py)."""

    version: int
    number: int

    def log_keys(self) -> list[str]:
        return [evaluation_log_key(self.version, f"call-{self.number}")]

    def find(self) -> None:
        return None

    def write(self, scope: CompletionScope, rollout: FinishedRollout | None) -> RolloutRun | None:
        return None if rollout is None else rollout.run
