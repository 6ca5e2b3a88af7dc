"""Prepared batches: advantages per token, computed by the user's `prepare_batch`.

Owns the function's input, the validation of its result, and the file that stores it, so that a
redo, a replay and `everburn verify` never call the function again. Doesn't own when a batch is
sealed (the workflow), the forward pass (trainers/) or datums (datums.py).
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everburn.config import Entrypoint
from everburn.learning.group import GroupManifest, load_group
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, RunRef, StoredRef, in_order
from everburn.records.keys import ROWS_KEY, prepared_batch_key
from everburn.records.ledger import PreparedBatch
from everburn.records.store import ArtifactStore, through_outages
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.dataset import Row, stored_rows
from everburn.usercode.entrypoints import call
from everburn.usercode.limits import LimitedLoop

Score = Callable[[list[list[int]]], Awaitable[list[list[float]]]]
"""Token sequences to the logprob of each token after the first."""


class InvalidBatchError(ValueError):
    """`prepare_batch` returned an invalid result. Fatal: a retry would return the same."""


@dataclass(frozen=True, slots=True)
class BatchCompletion:
    """A surviving completion. advantage: from the run's advantage function."""

    completion: int
    reward: float
    advantage: float
    rollout: RolloutRun


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """An accepted prompt group. row: dataset row. version: policy version at admission."""

    cursor: int
    version: int
    row: dict[str, Any]
    completions: list[BatchCompletion]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sealed batch of one optimizer step, as `prepare_batch(batch, **kwargs)` receives it.

    The function, plain or async, returns `result[group][completion][segment]` in the order of this
    batch: one advantage for all trained tokens of the segment, or one per token (those of untrained
    tokens are ignored). Segments whose advantages are all zero aren't sent to the trainer.
    """

    step: int
    groups: list[BatchGroup]
    _score: Score = field(repr=False)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs under the policy that this step trains, in one `forward` request.

        Returns, per sequence of n >= 2 token ids, the logprobs of the n-1 tokens after the first
        (nats, at temperature 1). An error of the trainer is raised again when the user function
        ends, even if it was caught: advantages computed without the scores must not be stored.
        """
        token_ids = [list(map(int, sequence)) for sequence in sequences]
        if not token_ids:
            return []
        for index, sequence in enumerate(token_ids):
            if len(sequence) < 2:
                raise ValueError(f"sequence {index} has {len(sequence)} token(s); two are needed")
        return await self._score(token_ids)


class SegmentKey(NamedTuple):
    """Identifies a segment within a run."""

    group: GroupKey
    completion: int
    segment: int


SegmentAdvantages = Mapping[SegmentKey, Sequence[float]]
"""Advantages per segment and token."""


async def prepare_batch(
    run: RunRef,
    step: int,
    groups: Sequence[GroupKey],
    entrypoint: Entrypoint,
    score: Score,
    user_loop: LimitedLoop,
) -> PreparedBatch:
    """Call the user's function and store its advantages, unless they are stored already.

    user_loop: runs the function; its deadline doesn't cover the store.

    Raises:
        EntrypointError, InvalidBatchError, UserCodeStuckError, and the function's own errors.
        StoreError: the store kept failing.
    """
    store = ArtifactStore.of(run)
    key = prepared_batch_key(step, groups)
    if not await through_outages(store.exists, key):
        scoring = _Scoring(score)
        manifests, batch = await through_outages(_read_batch, run, step, groups, scoring)

        async def compute() -> dict[str, list[Any]]:
            result = call(entrypoint, batch)
            if inspect.isawaitable(result):
                result = await result
            return _columns(manifests, batch, result, f"{entrypoint.name}, step {step}")

        try:
            columns = await user_loop.run(compute)
        finally:
            scoring.check()
        # If a writer of an abandoned lease was faster, its file stays.
        await through_outages(store.put_table, key, columns, _schema())
    return await through_outages(_prepared, store, key)


def _read_batch(
    run: RunRef, step: int, groups: Sequence[GroupKey], score: Score
) -> tuple[list[GroupManifest], Batch]:
    store = ArtifactStore.of(run)
    manifests = [load_group(store, group) for group in groups]
    rows = stored_rows(run, ROWS_KEY)
    return manifests, Batch(step, [_batch_group(rows, store, m) for m in manifests], score)


def _prepared(store: ArtifactStore, key: str) -> PreparedBatch:
    ref = store.ref(key)
    advantages = segment_advantages(store, ref)
    trained = [key for key, values in advantages.items() if any(values)]
    return PreparedBatch(
        advantages=ref,
        groups=in_order({key.group for key in trained}),
        datums=len(trained),
    )


class _Scoring:
    """The trainer's forward pass; remembers its first error."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._failure: Exception | None = None

    async def __call__(self, sequences: list[list[int]]) -> list[list[float]]:
        try:
            return await self._score(sequences)
        except Exception as error:
            self._failure = self._failure or error
            raise

    def check(self) -> None:
        """Raise the first error, if any."""
        if self._failure is not None:
            raise self._failure


def segment_advantages(store: ArtifactStore, ref: StoredRef) -> SegmentAdvantages:
    """The stored advantages: float32, zero at untrained tokens.

    Raises:
        CorruptArtifactError, FileNotFoundError
    """
    return {
        SegmentKey(
            GroupKey(cursor=row["cursor"], attempt=row["attempt"], incarnation=row["incarnation"]),
            row["completion"],
            row["segment"],
        ): row["advantages"]
        for row in store.get_table(ref)
    }


def _batch_group(rows: list[Row], store: ArtifactStore, manifest: GroupManifest) -> BatchGroup:
    # An accepted group has members, since min_group_size is at least 1.
    row_index = manifest.members[0].row_index
    return BatchGroup(
        cursor=manifest.key.cursor,
        version=manifest.version,
        row=rows[row_index],
        completions=[
            BatchCompletion(
                completion=member.completion,
                reward=member.reward,
                advantage=member.advantage,
                rollout=read_rollout(store, member.stored)[1],
            )
            for member in manifest.members
        ],
    )


def _columns(
    manifests: Sequence[GroupManifest], batch: Batch, result: object, where: str
) -> dict[str, list[Any]]:
    """The user function's result as file columns. Raises InvalidBatchError."""
    columns: dict[str, list[Any]] = {name: [] for name in _schema().names}
    group_results = _items(result, len(batch.groups), "groups", where)
    for manifest, group, group_result in zip(manifests, batch.groups, group_results, strict=True):
        row = f"{where} · row {group.cursor}"
        completion_results = _items(group_result, len(group.completions), "completions", row)
        for completion, completion_result in zip(
            group.completions, completion_results, strict=True
        ):
            place = f"{row} · completion {completion.completion}"
            segments = completion.rollout.segments
            advantages = _items(completion_result, len(segments), "segments", place)
            for index, (segment, advantage) in enumerate(zip(segments, advantages, strict=True)):
                values = _per_token(advantage, len(segment.tokens), f"{place} · segment {index}")
                trained = [0, *segment.loss_mask[1:]]
                columns["cursor"].append(manifest.key.cursor)
                columns["attempt"].append(manifest.key.attempt)
                columns["incarnation"].append(manifest.key.incarnation)
                columns["completion"].append(completion.completion)
                columns["segment"].append(index)
                columns["advantages"].append(
                    [value if flag else 0.0 for value, flag in zip(values, trained, strict=True)]
                )
    return columns


def _per_token(advantage: Any, tokens: int, where: str) -> list[float]:
    if isinstance(advantage, int | float) or getattr(advantage, "ndim", None) == 0:
        values = [float(advantage)] * tokens
    else:
        values = list(map(float, _items(advantage, tokens, "tokens", where)))
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise InvalidBatchError(f"{where}: advantage {position} is {value}, not finite")
    return values


def _items(value: Any, count: int, what: str, where: str) -> list[Any]:
    """The items of a sequence of length `count`. Raises InvalidBatchError."""
    try:
        items = list(value)
    except TypeError:
        raise InvalidBatchError(
            f"{where}: prepare_batch returned {type(value).__name__} instead of a list of {count} "
            f"{what}"
        ) from None
    if len(items) != count:
        raise InvalidBatchError(
            f"{where}: prepare_batch returned {len(items)} item(s) for {count} {what}"
        )
    return items


def _schema() -> Any:
    import pyarrow as pa

    return pa.schema(
        [
            ("cursor", pa.int64()),
            ("attempt", pa.int32()),
            ("incarnation", pa.int32()),
            ("completion", pa.int32()),
            ("segment", pa.int32()),
            ("advantages", pa.list_(pa.float32())),
        ]
    )
