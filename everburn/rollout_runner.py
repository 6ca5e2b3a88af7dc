"""Running rollout functions: one runner per process and run.

Owns the setup of user code (tokenizer, sampler, rollout function), the call with its context and
deadline, validation and the written result. Doesn't own retries (the PromptGroup workflow), the
loop it runs on (user_loop.py) or what a group makes of it (learning/group.py).
"""

import asyncio
import copy
import itertools
import time
from dataclasses import dataclass
from typing import Any

from everburn.call_log import CallLog
from everburn.config import RunConfig
from everburn.dataset import Position, Row, RowOrder, stored_rows
from everburn.earlier_attempts import adopt_rollout, earlier_call_logs
from everburn.entrypoints import call, resolve
from everburn.learning.rollout_file import CompletionRecord, write_rollout
from everburn.refs import (
    EVALUATION_ROWS_KEY,
    ROWS_KEY,
    GroupKey,
    RolloutOutcome,
    RolloutStatus,
    RunRef,
    call_log_key,
    completion_name,
    evaluation_name,
    rollout_key,
)
from everburn.resources import Resources, reap_at_end
from everburn.rollouts import (
    RecoverableRolloutError,
    RolloutFn,
    RolloutRun,
    RolloutSetup,
    context_parameters,
    require_routing,
    validate_rollout,
)
from everburn.run_folder import stored_config
from everburn.sampling import CompletionScope, Sampler
from everburn.store import ArtifactStore, when_there_is_space
from everburn.tokenizers import load_tokenizer, tokenizer_name


@dataclass(frozen=True, slots=True)
class Finished:
    """What a rollout function returned, validated, and what was noted on the way."""

    run: RolloutRun
    scope: CompletionScope
    seconds: float


class RolloutRunner:
    """The user's rollout function for one run in this process."""

    def __init__(self, run: RunRef) -> None:
        self.run = run
        self.store = ArtifactStore.of(run)
        self.config = stored_config(run)
        self._tokenizer = load_tokenizer(self.config)
        self._vocab_size = len(self._tokenizer)
        self._sampler = Sampler(self.store, self.config, self._tokenizer)
        self._rollout_fn = make_rollout_fn(
            self.config, self._tokenizer, self._sampler, Resources(self.store)
        )
        self._wanted = context_parameters(self._rollout_fn)
        self._records = self.config.record_sampling_calls

    async def complete(self, group: GroupKey, completion: int, version: int) -> RolloutOutcome:
        """Run one completion of a row to its terminal record; finds an earlier attempt's.

        Its status is "succeeded", or "dropped" where the function returned None.

        Raises:
            InvalidRolloutError, TimeoutError, and whatever the function raises.
        """
        key = rollout_key(group, completion)
        if self.store.exists(key) or await when_there_is_space(
            adopt_rollout, self.store, group, completion, version
        ):
            return RolloutOutcome(completion=completion, status="succeeded", reused=True)
        position = self.order.position(group.cursor)
        where = f"run {self.run.id} · row {group.cursor} · completion {completion}"
        context = {
            "cursor_index": group.cursor,
            "row_index": position.row_index,
            "epoch": position.epoch,
            "rollout_idx": completion,
            "sample_index": group.cursor * self.config.completions_per_prompt + completion,
            "end_of_epoch": position.end_of_epoch,
            "evaluation": False,
        }
        log = await asyncio.to_thread(self._call_log, group, completion)
        name = completion_name(group, completion)
        scope = CompletionScope(where, version, log=log, run=self.run.id, name=name)
        row = stored_rows(self.run, ROWS_KEY)[position.row_index]
        try:
            finished = await self._call(row, context, scope, self.config.rollout_timeout)
        except RecoverableRolloutError as error:
            if error.sample_afresh and log is not None:
                log.forget()
            raise
        if finished is None:
            return self._outcome(completion, "dropped", log)
        record = self._record(finished, group, position, completion, version)
        # Off the loop: compressing and writing would hold up other rollouts.
        await when_there_is_space(write_rollout, self.store, key, record, finished.run)
        return self._outcome(completion, "succeeded", log)

    async def evaluate(self, index: int, version: int) -> dict[str, Any]:
        """Evaluate one held-out row under a policy version; returns its report.

        Raises:
            InvalidRolloutError, TimeoutError, and whatever the function raises.
        """
        row = stored_rows(self.run, EVALUATION_ROWS_KEY)[index]
        context = evaluation_context(index)
        where = f"run {self.run.id} · evaluation row {index}"
        scope = self._evaluation_scope(where, version, f"row-{index}")
        finished = await self._call(row, context, scope, self.config.rollout_timeout)
        if finished is None:
            raise ValueError(f"{where}: the rollout function returned None")
        return {
            "prompt": self._prompt(finished.run),
            "reward": float(finished.run.segments[0].reward),
            "info": finished.run.info,
            "answer": self._answer(finished.run),
            "output_tokens": finished.scope.output_tokens,
            "at_token_limit": finished.scope.at_token_limit,
        }

    def evaluation_rollout_fn(self, version: int) -> RolloutFn:
        """The rollout function as an evaluation function calls it: pinned to a version.

        Called with a row, and any of the context parameters in place of those that it gets
        otherwise: calls are numbered as held-out rows are.
        """
        numbers = itertools.count()

        async def rollout_fn(sample_prompt: Row, **context: Any) -> RolloutRun | None:
            number = next(numbers)
            where = f"run {self.run.id} · evaluation call {number}"
            scope = self._evaluation_scope(where, version, f"call-{number}")
            given = evaluation_context(number) | context
            finished = await self._call(sample_prompt, given, scope, self.config.rollout_timeout)
            return None if finished is None else finished.run

        return rollout_fn

    def _call_log(self, group: GroupKey, completion: int) -> CallLog | None:
        if not self._records:
            return None
        earlier = earlier_call_logs(self.store, group, completion)
        return CallLog(self.store, call_log_key(group, completion), earlier)

    def _evaluation_scope(self, where: str, version: int, part: str) -> CompletionScope:
        return CompletionScope(
            where,
            version,
            self.config.evaluation_temperature,
            run=self.run.id,
            name=evaluation_name(version, part),
        )

    def _outcome(
        self, completion: int, status: RolloutStatus, log: CallLog | None
    ) -> RolloutOutcome:
        if log is None:
            return RolloutOutcome(completion=completion, status=status)
        log.forget()
        return RolloutOutcome(completion=completion, status=status, reused=log.reused > 0)

    @property
    def order(self) -> RowOrder:
        rows = len(stored_rows(self.run, ROWS_KEY))
        return RowOrder(rows, self.config.shuffle, self.config.seed)

    def row(self, cursor: int) -> Row:
        """The dataset row that a cursor points at."""
        return stored_rows(self.run, ROWS_KEY)[self.order.position(cursor).row_index]

    def close(self) -> None:
        """Close the sampler's connections."""
        self._sampler.close()

    async def _call(
        self, row: Row, context: dict[str, Any], scope: CompletionScope, timeout: float
    ) -> Finished | None:
        await reap_at_end(self.store, scope.name)  # of an attempt whose worker died
        started = time.monotonic()
        wanted = {name: value for name, value in context.items() if name in self._wanted}
        try:
            with self._sampler.serving(scope):
                # A copy: user code may change its row, and the next completion gets the same one.
                result = await asyncio.wait_for(
                    self._rollout_fn(copy.deepcopy(row), **wanted), timeout
                )
        finally:
            # Shielded: also what is cancelled, perhaps twice, leaves nothing behind.
            await asyncio.shield(asyncio.create_task(reap_at_end(self.store, scope.name)))
        if result is None:
            return None
        run = validate_rollout(result, scope.where, self._vocab_size)
        if self.config.router_replay:
            require_routing(run, scope.where)
        return Finished(run, scope, time.monotonic() - started)

    def _record(
        self,
        finished: Finished,
        group: GroupKey,
        position: Position,
        completion: int,
        version: int,
    ) -> CompletionRecord:
        return CompletionRecord(
            run=self.run.id,
            cursor=group.cursor,
            row_index=position.row_index,
            epoch=position.epoch,
            attempt=group.attempt,
            completion=completion,
            version=version,
            versions=[sample.version for sample in finished.scope.calls],
            at_token_limit=finished.scope.at_token_limit,
            output_tokens=finished.scope.output_tokens,
            prompt=self._prompt(finished.run),
            answer=self._answer(finished.run),
            info=finished.run.info,
            seconds=finished.seconds,
        )

    def _prompt(self, run: RolloutRun) -> str:
        first = run.segments[0]
        mask = list(first.loss_mask)
        return str(self._tokenizer.decode(list(first.tokens[: mask.index(1)])))

    def _answer(self, run: RolloutRun) -> str:
        if run.answer is not None:
            return run.answer
        trained = [
            token
            for segment in run.segments
            for token, flag in zip(segment.tokens, segment.loss_mask, strict=True)
            if flag
        ]
        return str(self._tokenizer.decode(trained, skip_special_tokens=True))


def evaluation_context(index: int) -> dict[str, Any]:
    """The context parameters of the index-th held-out row: each is drawn once."""
    return {
        "cursor_index": index,
        "row_index": index,
        "epoch": 0,
        "rollout_idx": 0,
        "sample_index": index,
        "end_of_epoch": False,
        "evaluation": True,
    }


def make_rollout_fn(
    config: RunConfig, tokenizer: Any, sampler: Sampler, resources: Resources
) -> RolloutFn:
    """Call the user's factory.

    Raises:
        EntrypointError, and whatever the factory raises.
    """
    setup = RolloutSetup(
        tokenizer=tokenizer,
        tokenizer_id=tokenizer_name(config),
        sampling_kwargs={
            "max_tokens": config.max_completion_tokens,
            "temperature": config.temperature,
        },
        sampler=sampler,
        model=config.base_model,
        completions_per_prompt=config.completions_per_prompt,
        extras=dict(config.extras),
        resources=resources,
    )
    return call(config.rollout, setup)  # type: ignore[no-any-return]


def resolve_names(config: RunConfig) -> None:
    """Import everything that a config names. Raises EntrypointError for the first that fails."""
    for entrypoint in (*config.rollout_entrypoints, *config.trainer_entrypoints):
        resolve(entrypoint)
