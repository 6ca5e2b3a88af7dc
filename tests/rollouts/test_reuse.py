"""What an attempt reuses of earlier attempts of its row."""

from pathlib import Path

from everburn.learning.rollout_file import read_rollout, write_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import call_log_key, group_key, rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun, RolloutSample
from everburn.rollouts.dataset import Position
from everburn.rollouts.destinations import TrainingRollout
from everburn.rollouts.reuse import EarlierAttempts
from support.records import a_record

RUN = RolloutRun(
    [RolloutSample(tokens=[1, 2, 3], logprobs=[0.0, -1.0, -0.5], loss_mask=[0, 1, 1], reward=0.25)],
    answer="3",
    info={"judge": [1, 2]},
)


def attempt(number: int, cursor: int = 17, incarnation: int = 0) -> GroupKey:
    return GroupKey(cursor=cursor, attempt=number, incarnation=incarnation)


RESUMED = attempt(0, incarnation=1)


def unused(store: ArtifactStore, group: GroupKey) -> list[GroupKey]:
    return EarlierAttempts(store).unused(group)


def destination(
    store: ArtifactStore, group: GroupKey, completion: int, version: int, earlier: list[GroupKey]
) -> TrainingRollout:
    position = Position(group.cursor, epoch=0, row_index=4, end_of_epoch=False)
    return TrainingRollout(store, group, completion, version, position, earlier)


def has_rollout(
    store: ArtifactStore, group: GroupKey, completion: int, version: int, earlier: list[GroupKey]
) -> bool:
    return destination(store, group, completion, version, earlier).find() is not None


def finish(store: ArtifactStore, group: GroupKey, completion: int) -> None:
    record = a_record(
        cursor=group.cursor,
        row_index=4,
        attempt=group.attempt,
        incarnation=group.incarnation,
        completion=completion,
        version=2,
        versions=[2, 3],
        prompt="1+2=",
        answer="3",
        info={"judge": [1, 2]},
        seconds=0.5,
    )
    write_rollout(store, rollout_key(group, completion), record, RUN)


def test_a_finished_rollout_is_reused_unchanged(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    finish(store, attempt(0), completion=3)
    finish(store, attempt(0, cursor=170), completion=2)

    earlier = unused(store, RESUMED)
    assert has_rollout(store, RESUMED, 3, 9, earlier)
    record, run = read_rollout(store, rollout_key(RESUMED, 3))
    assert (record.attempt, record.incarnation) == (0, 1)
    assert (record.version, record.versions) == (9, [2, 3])
    assert (record.prompt, record.seconds, run.info, run.answer) == (
        "1+2=",
        0.5,
        {"judge": [1, 2]},
        "3",
    )
    (segment,) = run.segments
    assert (list(segment.tokens), list(segment.logprobs)) == ([1, 2, 3], [0.0, -1.0, -0.5])
    assert not has_rollout(store, RESUMED, 2, 9, earlier)


def test_rollouts_of_a_finished_group_are_not_reused(tmp_path: Path) -> None:
    """An incomplete group is retried in order to get new completions."""
    store = ArtifactStore(str(tmp_path))
    for number in (0, 1, 3):
        finish(store, attempt(number), completion=0)
    store.put_json(group_key(attempt(1)), {"outcome": "incomplete"})

    assert unused(store, attempt(0)) == []
    assert unused(store, attempt(2)) == []
    assert unused(store, RESUMED) == [attempt(3)]
    assert not has_rollout(store, attempt(2), 0, 9, unused(store, attempt(2)))


def test_recorded_calls_are_found_newest_first(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    for number in (0, 1):
        store.append_lines(call_log_key(attempt(number), 1), ["{}"])
    finish(store, attempt(2), completion=0)
    found = [call_log_key(attempt(number), 1) for number in (1, 0)]
    earlier = unused(store, attempt(3))
    for completion, logs in ((1, found), (0, [])):
        own, *recorded = destination(store, attempt(3), completion, 9, earlier).log_keys()
        assert own == call_log_key(attempt(3), completion) and recorded == logs


class Listed(ArtifactStore):
    """Counts how often its folders are listed."""

    times = 0

    def keys(self, folder: str) -> list[str]:
        self.times += 1
        return super().keys(folder)


def test_rollouts_of_earlier_incarnations_are_listed_once_for_all_rows(tmp_path: Path) -> None:
    store = Listed(str(tmp_path))
    for cursor in range(8):
        finish(store, attempt(0, cursor), completion=0)
    earlier = EarlierAttempts(store)
    for cursor in range(8):
        assert earlier.unused(attempt(0, cursor)) == []
    assert store.times == 0
    for cursor in range(16):
        left = [attempt(0, cursor)] if cursor < 8 else []
        assert earlier.unused(attempt(0, cursor, 1)) == left
    assert store.times == 1

    # Rollouts of this incarnation are found without another listing, and by the next one, too.
    finish(store, attempt(0, 3, 1), completion=0)
    assert earlier.unused(attempt(1, 3, 1)) == [attempt(0, 3, 1), attempt(0, 3)]
    assert store.times == 1
    assert earlier.unused(attempt(0, 3, 2)) == [attempt(0, 3, 1), attempt(0, 3)]
    assert store.times == 2
