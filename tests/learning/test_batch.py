"""Prepared batches: the input of `prepare_batch`, its validation and its storage."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everburn.config import Entrypoint
from everburn.learning.batch import Batch, InvalidBatchError, Score, prepare_batch
from everburn.learning.group import GroupManifest, judge_group, keep_group, load_group
from everburn.learning.rollout_file import write_rollout
from everburn.learning.submissions import recorded_datums
from everburn.records.ids import GroupKey, RolloutOutcome, RunRef, group_ranges
from everburn.records.keys import ROWS_KEY, rollout_key
from everburn.records.ledger import PreparedBatch
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun, RolloutSample
from everburn.rollouts.dataset import write_rows
from everburn.usercode.limits import LimitedLoop
from support.records import a_record

KEYS = [GroupKey(cursor=4), GroupKey(cursor=7, attempt=1, incarnation=2)]
MASK = [0, 1, 0, 1]


@pytest.fixture
def run(tmp_path: Path) -> RunRef:
    """A run with two accepted groups of two completions, the second one with two segments."""
    run = RunRef(store=str(tmp_path), id="run")
    store = ArtifactStore.of(run)
    write_rows(store, ROWS_KEY, [{"question": "a"}, {"question": "b"}])
    for index, key in enumerate(KEYS):
        for completion in (0, 1):
            reward = float(completion)
            segments = [
                RolloutSample([1, 2, 3, 4], [0.0, -1.0, 0.0, -2.0], MASK, reward)
                for _ in range(completion + 1)
            ]
            record = a_record(
                cursor=key.cursor,
                row_index=index,
                attempt=key.attempt,
                incarnation=key.incarnation,
                completion=completion,
                version=3,
                versions=[3],
                info={"turns": 2},
            )
            write_rollout(store, rollout_key(key, completion), record, RolloutRun(segments))
        outcomes = [RolloutOutcome(completion=i, status="succeeded") for i in (0, 1)]
        keep_group(store, judge_group(store, key, 3, outcomes, 1, True, dict, None))
    return run


async def score(sequences: list[list[int]]) -> list[list[float]]:
    return [[-0.5] * (len(sequence) - 1) for sequence in sequences]


functions: dict[str, Callable[[Batch], Any]] = {}


def dispatch(batch: Batch, name: str) -> Any:
    return functions[name](batch)


async def prepare(run: RunRef, function: Callable[[Batch], Any]) -> PreparedBatch:
    return await prepare_with(run, function, score)


async def prepare_with(
    run: RunRef, function: Callable[[Batch], Any], score: Score
) -> PreparedBatch:
    functions["current"] = function
    entrypoint = Entrypoint(name=f"{__name__}:dispatch", kwargs={"name": "current"})
    loop = LimitedLoop("test")
    try:
        return await prepare_batch(run, 5, KEYS, entrypoint, score, loop)
    finally:
        loop.close()


def manifests(run: RunRef) -> list[GroupManifest]:
    return [load_group(ArtifactStore.of(run), key) for key in KEYS]


async def test_the_function_gets_rows_rewards_rollouts_and_the_trainers_logprobs(run: RunRef):
    seen: list[Batch] = []
    scored: list[list[list[float]]] = []

    async def function(batch: Batch) -> list[list[list[float]]]:
        seen.append(batch)
        scored.append(await batch.logprobs([(1, 2, 3), [4, 5]]))
        return [[[0.0], [1.0, 0.0]], [[0.0], [0.0, 0.0]]]

    await prepare(run, function)
    (batch,) = seen
    assert (batch.step, [group.cursor for group in batch.groups]) == (5, [4, 7])
    assert [group.row for group in batch.groups] == [{"question": "a"}, {"question": "b"}]
    assert [group.version for group in batch.groups] == [3, 3]
    first, second = batch.groups[0].completions
    assert (first.reward, second.reward) == (0.0, 1.0)
    assert first.advantage == -second.advantage < 0
    assert [len(c.rollout.segments) for c in (first, second)] == [1, 2]
    assert first.rollout.info == {"turns": 2}
    assert scored == [[[-0.5, -0.5], [-0.5]]]


async def test_advantages_reach_the_datums_per_token_and_per_segment(run: RunRef):
    def function(batch: Batch) -> Any:
        return [[[[9.0, 0.5, 9.0, -1.5]], [2.0, 0.0]], [[0.0], [0, [0, 0, 0, 1]]]]

    prepared = await prepare(run, function)
    datums = recorded_datums(ArtifactStore.of(run), manifests(run), prepared)
    assert [datum.advantages.tolist() for datum in datums] == [
        [0.5, 0.0, -1.5],  # advantages of untrained tokens are ignored
        [2.0, 0.0, 2.0],
        [0.0, 0.0, 1.0],
    ]
    assert (group_ranges(prepared.groups), prepared.datums) == ("4,7.1i2", 3)


async def test_stored_advantages_are_used_and_the_function_is_not_called_again(run: RunRef):
    calls: list[int] = []

    def function(batch: Batch) -> Any:
        calls.append(batch.step)
        value = float(len(calls))
        return [[[value], [value, value]], [[0.0], [0.0, 0.0]]]

    first = await prepare(run, function)
    assert await prepare(run, function) == first
    assert calls == [5]
    assert (group_ranges(first.groups), first.datums) == ("4", 3)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "returned NoneType instead of a list of 2 groups"),
        ([[[0.0], [0.0, 0.0]]], "returned 1 item(s) for 2 groups"),
        (
            [[[0.0]], [[0.0], [0.0, 0.0]]],
            "row 4: prepare_batch returned 1 item(s) for 2 completions",
        ),
        (
            [[[0.0], [0.0]], [[0.0], [0.0, 0.0]]],
            "row 4 · completion 1: prepare_batch returned 1 item(s) for 2 segments",
        ),
        (
            [[[0.0], [0.0, [1.0]]], [[0.0], [0.0, 0.0]]],
            "completion 1 · segment 1: prepare_batch returned 1 item(s) for 4 tokens",
        ),
        (
            [[[0.0], [0.0, 0.0]], [[float("nan")], [0.0, 0.0]]],
            "row 7 · completion 0 · segment 0: advantage 0 is nan, not finite",
        ),
    ],
    ids=["nothing", "groups", "completions", "segments", "tokens", "nan"],
)
async def test_an_invalid_result_is_refused_with_its_place(run: RunRef, result: Any, text: str):
    with pytest.raises(InvalidBatchError) as error:
        await prepare(run, lambda _: result)
    assert text in str(error.value)
    assert "step 5" in str(error.value)
    assert ArtifactStore.of(run).keys("steps/000005") == []


async def test_a_sequence_of_one_token_cannot_be_scored(run: RunRef):
    async def function(batch: Batch) -> Any:
        return await batch.logprobs([[1, 2], [3]])

    with pytest.raises(ValueError, match=r"sequence 1 has 1 token\(s\); two are needed"):
        await prepare(run, function)


async def test_an_error_of_the_trainer_is_raised_even_if_the_function_catches_it(run: RunRef):
    async def failing_score(sequences: list[list[int]]) -> list[list[float]]:
        raise ConnectionError("the session is gone")

    async def suppress(batch: Batch) -> Any:
        with contextlib.suppress(ConnectionError):
            await batch.logprobs([[1, 2]])
        return [[[1.0], [1.0, 1.0]], [[1.0], [1.0, 1.0]]]

    async def replace(batch: Batch) -> Any:
        try:
            return await batch.logprobs([[1, 2]])
        except ConnectionError as error:
            raise KeyError("what now") from error

    for function in (suppress, replace):
        with pytest.raises(ConnectionError, match="the session is gone"):
            await prepare_with(run, function, failing_score)
    assert ArtifactStore.of(run).keys("steps/000005") == []
