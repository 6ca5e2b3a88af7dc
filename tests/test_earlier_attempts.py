"""What an attempt finds of earlier attempts of its row."""

from pathlib import Path

from everburn.earlier_attempts import adopt_rollout, earlier_call_logs, unused_attempts
from everburn.learning.rollout_file import read_rollout, write_rollout
from everburn.refs import GroupKey, call_log_key, group_key, rollout_key
from everburn.rollouts import RolloutRun, RolloutSample
from everburn.store import ArtifactStore
from support.records import a_record

RUN = RolloutRun(
    [RolloutSample(tokens=[1, 2, 3], logprobs=[0.0, -1.0, -0.5], loss_mask=[0, 1, 1], reward=0.25)],
    answer="3",
    info={"judge": [1, 2]},
)


def attempt(number: int, cursor: int = 17) -> GroupKey:
    return GroupKey(cursor=cursor, attempt=number)


def finish(store: ArtifactStore, group: GroupKey, completion: int) -> None:
    record = a_record(
        cursor=group.cursor,
        row_index=4,
        attempt=group.attempt,
        completion=completion,
        version=2,
        versions=[2, 3],
        prompt="1+2=",
        answer="3",
        info={"judge": [1, 2]},
        seconds=0.5,
    )
    write_rollout(store, rollout_key(group, completion), record, RUN)


def test_a_rollout_that_was_finished_is_taken_over_as_it_was(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    finish(store, attempt(0), completion=3)
    finish(store, attempt(0, cursor=170), completion=2)

    assert adopt_rollout(store, attempt(1000), 3, version=9)
    record, run = read_rollout(store, rollout_key(attempt(1000), 3))
    assert (record.attempt, record.version, record.versions) == (1000, 9, [2, 3])
    assert (record.prompt, record.seconds, run.info, run.answer) == (
        "1+2=",
        0.5,
        {"judge": [1, 2]},
        "3",
    )
    (segment,) = run.segments
    assert (list(segment.tokens), list(segment.logprobs)) == ([1, 2, 3], [0.0, -1.0, -0.5])
    assert not adopt_rollout(store, attempt(1000), 2, version=9)


def test_draws_that_came_to_a_group_are_used_up(tmp_path: Path) -> None:
    """An incomplete group is begun again for the sake of other draws."""
    store = ArtifactStore(str(tmp_path))
    for number in (0, 1, 3):
        finish(store, attempt(number), completion=0)
    store.put_json(group_key(attempt(1)), {"fate": "incomplete"})

    assert unused_attempts(store, attempt(0)) == []
    assert unused_attempts(store, attempt(2)) == []
    assert unused_attempts(store, attempt(1000)) == [attempt(3)]
    assert not adopt_rollout(store, attempt(2), 0, version=9)


def test_recorded_calls_are_found_newest_first(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    for number in (0, 1):
        store.append_lines(call_log_key(attempt(number), 1), ["{}"])
    finish(store, attempt(2), completion=0)
    found = [call_log_key(attempt(number), 1) for number in (1, 0)]
    assert earlier_call_logs(store, attempt(3), 1) == found
    assert earlier_call_logs(store, attempt(3), 0) == []
