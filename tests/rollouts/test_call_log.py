"""A retried completion repeats no call that an earlier attempt finished."""

from pathlib import Path

import pytest

from everburn.records.store import ArtifactStore
from everburn.rollouts.call_log import CallLog, LoggedCall, request_digest
from everburn.rollouts.contract import Sample

KEY = "rollouts/row-000017.0/_calls-3.jsonl"


def a_call(index: int, prompt: list[int]) -> LoggedCall:
    return LoggedCall(
        index=index,
        digest=request_digest(prompt, {}),
        sample=Sample(
            tokens=[index, 9],
            logprobs=[-0.5, -0.1],
            raw_logprobs=None,
            text=f"answer {index}",
            finish_reason="stop",
            version=4,
        ),
    )


async def a_log_of(store: ArtifactStore, *prompts: list[int]) -> CallLog:
    """The log of an attempt that sampled from these prompts."""
    log = CallLog(store, KEY)
    for prompt in prompts:
        index, _ = log.take(request_digest(prompt, {}))
        await log.append(a_call(index, prompt))
    return log


def crash_while_writing(store: ArtifactStore) -> None:
    with Path(store.path(KEY)).open("a") as file:
        file.write('{"index": 1, "digest": "ab')


async def test_a_retry_with_the_same_requests_gets_the_recorded_answers(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1], [1, 2])
    retry = CallLog(store, KEY)

    assert retry.take(request_digest([1], {})) == (0, a_call(0, [1]))
    assert retry.take(request_digest([1, 2], {})) == (1, a_call(1, [1, 2]))
    assert retry.take(request_digest([1, 2, 3], {})) == (2, None)
    assert retry.reused == 2


async def test_earlier_logs_answer_too_and_are_deleted_with_the_last_one(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1])
    again = CallLog(store, KEY.replace(".0", ".1"), [KEY])

    assert again.take(request_digest([1], {}))[1] == a_call(0, [1])
    index, answer = again.take(request_digest([1, 2], {}))
    assert answer is None
    await again.append(a_call(index, [1, 2]))
    third = CallLog(store, KEY.replace(".0", ".2"), [KEY.replace(".0", ".1"), KEY])
    assert third.take(request_digest([1], {}))[1] is not None
    assert third.take(request_digest([1, 2], {}))[1] is not None

    third.delete()
    assert store.keys("rollouts/row-000017.0") == store.keys("rollouts/row-000017.1") == []


async def test_a_request_that_differs_has_no_recorded_answer(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1], [2])
    retry = CallLog(store, KEY)

    assert retry.take(request_digest([1], {}))[1] is not None
    assert retry.take(request_digest([99], {}))[1] is None
    assert retry.reused == 1


async def test_concurrent_requests_find_their_answers_in_any_order(
    tmp_path: Path,
) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1], [2])
    retry = CallLog(store, KEY)

    assert retry.take(request_digest([2], {})) == (0, a_call(1, [2]))
    assert retry.take(request_digest([1], {})) == (1, a_call(0, [1]))


async def test_each_answer_is_given_once(tmp_path: Path) -> None:
    """A prompt that is sampled twice gets two samples, also in a retry."""
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1], [1])
    retry = CallLog(store, KEY)

    asked = [retry.take(request_digest([1], {}))[1] for _ in range(3)]
    assert asked == [a_call(0, [1]), a_call(1, [1]), None]


async def test_parameters_are_part_of_the_request(tmp_path: Path) -> None:
    assert request_digest([1], {"temperature": 1.0}) != request_digest([1], {"temperature": 0.0})
    assert request_digest([1, 2], {}) != request_digest([12], {})


async def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1])
    crash_while_writing(store)
    retry = CallLog(store, KEY)

    assert retry.take(request_digest([1], {}))[1] is not None
    assert retry.take(request_digest([2], {}))[1] is None


async def test_a_line_after_a_cut_off_line_is_read(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    await a_log_of(store, [1])
    crash_while_writing(store)
    second = CallLog(store, KEY)
    second.take(request_digest([1], {}))
    index, _ = second.take(request_digest([2], {}))
    await second.append(a_call(index, [2]))
    third = CallLog(store, KEY)

    assert third.take(request_digest([1], {}))[1] is not None
    assert third.take(request_digest([2], {})) == (1, a_call(1, [2]))


async def test_a_call_that_cant_be_recorded_is_logged_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(str(tmp_path))
    store.put("rollouts", b"a file in the place of the folder")
    await CallLog(store, "rollouts/row-000017.0/_calls-3.jsonl").append(a_call(0, [1]))
    (record,) = caplog.records
    assert "sampling call 0 isn't recorded: can't write" in record.message


async def test_a_finished_completion_deletes_its_log(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    log = await a_log_of(store, [1])
    log.delete()
    log.delete()

    assert not store.exists(KEY)
