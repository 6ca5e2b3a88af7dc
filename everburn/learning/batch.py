"""Prepared batches: advantages per token, computed by the user's `prepare_batch`.

Owns what the function is given, the validation of what it returns, and the file in which that is
kept: written once per batch, so that a redo, a replay and `everburn verify` use what was recorded
and never call the function again. Doesn't own when a batch is sealed (the workflow), the forward
pass behind `Batch.logprobs` (trainers/) or datums (datums.py).
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from everburn.config import Entrypoint
from everburn.learning.group import GroupManifest, load_group
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, RunRef, StoredRef, encode_groups
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
    """`prepare_batch` returned what can't be trained on. Fatal: it would do so again."""


@dataclass(frozen=True, slots=True)
class BatchCompletion:
    """A surviving completion. advantage: what the run's advantage function gave it."""

    completion: int
    reward: float
    advantage: float
    rollout: RolloutRun


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """An accepted prompt group. row: its dataset row. version: the policy it was admitted at."""

    cursor: int
    version: int
    row: dict[str, Any]
    completions: list[BatchCompletion]


@dataclass(frozen=True, slots=True)
class Batch:
    """The sealed batch of one optimizer step, as `prepare_batch(batch, **kwargs)` receives it.

    The function, plain or async, returns an advantage for every segment, as
    `result[group][completion][segment]`, in the order of this batch: one number for all trained
    tokens of the segment, or one number per token of the segment (those of untrained tokens are
    ignored). Segments whose advantages are all zero aren't sent to the trainer.
    """

    step: int
    groups: list[BatchGroup]
    _score: Score = field(repr=False)

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Logprobs under the policy that this step trains, in one `forward` request.

        Returns, per sequence of n token ids, the n-1 logprobs of its tokens after the first, each
        given all tokens before it (nats, at temperature 1). Sequences have at least two tokens.

        An error of the trainer is raised again once the function ends, whatever it makes of it:
        advantages that were computed without the scores must not be kept.
        """
        wanted = [list(map(int, sequence)) for sequence in sequences]
        if not wanted:
            return []
        for index, sequence in enumerate(wanted):
            if len(sequence) < 2:
                raise ValueError(f"sequence {index} has {len(sequence)} token(s); two are needed")
        return await self._score(wanted)


class SegmentKey(NamedTuple):
    """Names a segment within a run."""

    group: GroupKey
    completion: int
    segment: int


SegmentAdvantages = Mapping[SegmentKey, Sequence[float]]
"""Advantages of segments, one per token."""


async def prepare_batch(
    run: RunRef,
    step: int,
    groups: Sequence[GroupKey],
    entrypoint: Entrypoint,
    score: Score,
    user_loop: LimitedLoop,
) -> PreparedBatch:
    """Call the user's function on the batch, and keep its advantages; or find those that were kept.

    user_loop: where the function runs. Its limit isn't that of reading the batch, or of waiting for
    a store that is full or fails.

    Raises:
        EntrypointError, InvalidBatchError, UserCodeStuckError, and whatever the function raises.
        StoreError: the store failed for long.
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
        # A concurrent writer of a lease that was given up may come first; its file stays.
        await through_outages(store.put_table, key, columns, _schema())
    return await through_outages(_prepared, store, key)


def _read_batch(
    run: RunRef, step: int, groups: Sequence[GroupKey], score: Score
) -> tuple[list[GroupManifest], Batch]:
    store = ArtifactStore.of(run)
    manifests = [load_group(store, group) for group in groups]
    rows = stored_rows(run, ROWS_KEY)
    return manifests, Batch(step, [_batch_group(rows, store, each) for each in manifests], score)


def _prepared(store: ArtifactStore, key: str) -> PreparedBatch:
    ref = store.ref(key)
    advantages = segment_advantages(store, ref)
    trained = [key for key, values in advantages.items() if any(values)]
    return PreparedBatch(
        advantages=ref,
        groups=encode_groups(list({key.group for key in trained})),
        datums=len(trained),
    )


class _Scoring:
    """The trainer's forward pass, and the first error that it ended in."""

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
        """Raise that error, if there was one."""
        if self._failure is not None:
            raise self._failure


def segment_advantages(store: ArtifactStore, ref: StoredRef) -> SegmentAdvantages:
    """What `prepare_batch` kept: float32, zero at untrained tokens.

    Raises:
        CorruptArtifactError, FileNotFoundError
    """
    return {
        SegmentKey(
            GroupKey(cursor=row["cursor"], attempt=row["attempt"]),
            row["completion"],
            row["segment"],
        ): row["advantages"]
        for row in store.get_table(ref)
    }


def _batch_group(rows: list[Row], store: ArtifactStore, manifest: GroupManifest) -> BatchGroup:
    # An accepted group has members: min_group_size is at least 1.
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
    """The result as the columns of its file. Raises InvalidBatchError."""
    columns: dict[str, list[Any]] = {name: [] for name in _schema().names}
    by_group = _items(result, len(batch.groups), "groups", where)
    for manifest, group, of_group in zip(manifests, batch.groups, by_group, strict=True):
        row = f"{where} · row {group.cursor}"
        by_completion = _items(of_group, len(group.completions), "completions", row)
        for one, of_completion in zip(group.completions, by_completion, strict=True):
            place = f"{row} · completion {one.completion}"
            segments = one.rollout.segments
            by_segment = _items(of_completion, len(segments), "segments", place)
            for index, (segment, given) in enumerate(zip(segments, by_segment, strict=True)):
                values = _per_token(given, len(segment.tokens), f"{place} · segment {index}")
                trained = [0, *segment.loss_mask[1:]]
                columns["cursor"].append(manifest.key.cursor)
                columns["attempt"].append(manifest.key.attempt)
                columns["completion"].append(one.completion)
                columns["segment"].append(index)
                columns["advantages"].append(
                    [value if flag else 0.0 for value, flag in zip(values, trained, strict=True)]
                )
    return columns


def _per_token(given: Any, tokens: int, where: str) -> list[float]:
    if isinstance(given, int | float) or getattr(given, "ndim", None) == 0:
        values = [float(given)] * tokens
    else:
        values = list(map(float, _items(given, tokens, "tokens", where)))
    for position, value in enumerate(values):
        if not math.isfinite(value):
            raise InvalidBatchError(f"{where}: advantage {position} is {value}, not finite")
    return values


def _items(value: Any, count: int, what: str, where: str) -> list[Any]:
    """The items of a sequence that must have `count` of them."""
    try:
        items = list(value)
    except TypeError:
        raise InvalidBatchError(
            f"{where}: prepare_batch returned {type(value).__name__} where a list of {count} "
            f"{what} is due"
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
            ("completion", pa.int32()),
            ("segment", pa.int32()),
            ("advantages", pa.list_(pa.float32())),
        ]
    )
