"""A group's completion, and the datums that a trainer is sent of it."""

from pathlib import Path

import pytest

from everburn.learning.datums import build_datum, group_datums
from everburn.learning.group import (
    Group,
    GroupManifest,
    find_group,
    judge_group,
    keep_group,
    load_group,
    skip_group,
)
from everburn.learning.rollout_file import read_rollout, write_rollout
from everburn.learning.submissions import prepare_submission
from everburn.records.ids import GroupKey, LeaseKey, RolloutOutcome
from everburn.records.keys import rollout_key, submission_key
from everburn.records.store import ArtifactStore, CorruptArtifactError
from everburn.rollouts.contract import RolloutRun, RolloutSample
from support.records import a_record

KEY = GroupKey(cursor=17)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def a_segment(reward: float, tokens: int = 4) -> RolloutSample:
    return RolloutSample(
        tokens=list(range(2, 2 + tokens)),
        logprobs=[0.0] + [-0.5] * (tokens - 1),
        loss_mask=[0] + [1] * (tokens - 1),
        reward=reward,
    )


def write(store: ArtifactStore, completion: int, run: RolloutRun) -> None:
    record = a_record(
        cursor=KEY.cursor,
        row_index=5,
        completion=completion,
        version=3,
        versions=[3],
        output_tokens=3,
        prompt="47+85=",
        answer="132",
        info={"got": 132},
    )
    write_rollout(store, rollout_key(KEY, completion), record, run)


def completed(
    store: ArtifactStore, rewards: list[float | None], min_group_size: int = 1, **options: object
) -> GroupManifest:
    """A group of completions with these rewards; None for one that was dropped."""
    outcomes = []
    for completion, reward in enumerate(rewards):
        if reward is not None:
            write(store, completion, RolloutRun([a_segment(reward)]))
        status = "dropped" if reward is None else "succeeded"
        outcomes.append(RolloutOutcome(completion=completion, status=status))
    manifest = judge_group(
        store,
        KEY,
        3,
        outcomes,
        min_group_size,
        bool(options.get("last", True)),
        lambda: {"a": 47},
        options.get("keep"),  # type: ignore[arg-type]
    )
    return keep_group(store, manifest)


def test_a_rollout_is_read_back_as_it_was_written(store: ArtifactStore) -> None:
    write(store, 0, RolloutRun([a_segment(1.0), a_segment(1.0, tokens=3)], info={"got": 132}))
    record, run = read_rollout(store, rollout_key(KEY, 0))

    assert (record.cursor, record.answer, record.info) == (17, "132", {"got": 132})
    assert [list(segment.tokens) for segment in run.segments] == [[2, 3, 4, 5], [2, 3, 4]]
    assert list(run.segments[0].loss_mask) == [0, 1, 1, 1]


def test_a_rollout_is_written_once(store: ArtifactStore) -> None:
    write(store, 0, RolloutRun([a_segment(1.0)]))
    write(store, 0, RolloutRun([a_segment(0.25)]))

    assert read_rollout(store, rollout_key(KEY, 0))[1].segments[0].reward == 1.0


def test_a_person_can_open_it_with_pandas(store: ArtifactStore) -> None:
    import pandas

    write(store, 0, RolloutRun([a_segment(1.0)]))
    write(store, 1, RolloutRun([a_segment(0.0)]))
    store.append_lines(f"rollouts/{KEY.name}/_calls-2.jsonl", ["{}"])
    table = pandas.read_parquet(store.path("rollouts"))

    assert sorted(table["reward"]) == [0.0, 1.0]


def test_survivors_share_out_their_advantages(store: ArtifactStore) -> None:
    manifest = completed(store, [1.0, None, 0.0, 0.0])

    assert manifest.outcome == "accepted"
    assert [member.completion for member in manifest.members] == [0, 2, 3]
    assert [round(member.advantage, 3) for member in manifest.members] == [1.155, -0.577, -0.577]
    assert [outcome.completion for outcome in manifest.lost] == [1]
    assert manifest.datums == 3


def test_too_few_survivors_leave_it_incomplete(store: ArtifactStore) -> None:
    group = completed(store, [1.0, None, None, 0.0], min_group_size=3, last=False)
    assert (group.outcome, group.rejected) == ("incomplete", False)


def test_the_last_attempts_group_decides_the_rows_outcome(store: ArtifactStore) -> None:
    group = completed(store, [1.0, None], min_group_size=2, last=True)
    assert (group.outcome, group.rejected) == ("incomplete", True)


def test_a_skipped_group_is_rejected(store: ArtifactStore) -> None:
    skip_group(store, KEY, version=3, completions=4)
    group = load_group(store, KEY)
    assert (group.outcome, group.rejected, group.members) == ("skipped", True, [])


def test_the_filter_sees_the_row_and_decides(store: ArtifactStore) -> None:
    seen: list[Group] = []

    def keep(group: Group) -> bool:
        seen.append(group)
        return False

    assert completed(store, [1.0, 0.0], keep=keep).outcome == "filtered"
    assert (seen[0].row, seen[0].rewards, seen[0].version) == ({"a": 47}, [1.0, 0.0], 3)


def test_completing_again_finds_what_was_decided(store: ArtifactStore) -> None:
    first = completed(store, [1.0, 0.0])

    assert judge_group(store, KEY, 3, [], 99, True, dict, lambda _: False) == first
    assert find_group(store, KEY) == first


def test_what_is_kept_first_stays(store: ArtifactStore) -> None:
    first = completed(store, [1.0, 0.0])
    late = first.model_copy(update={"outcome": "filtered", "rejected": True})

    assert keep_group(store, late) == first


def test_a_datum_predicts_each_token_from_those_before() -> None:
    segment = RolloutSample(
        tokens=[7, 8, 9, 10], logprobs=[0.0, 0.0, -1.0, -2.0], loss_mask=[0, 0, 1, 1], reward=1.0
    )
    datum = build_datum(segment, 0.5)

    assert datum.inputs.tolist() == [7, 8, 9]
    assert datum.targets.tolist() == [8, 9, 10]
    assert datum.mask.tolist() == [0, 1, 1]
    assert datum.logprobs.tolist() == [0, -1, -2]
    assert datum.advantages.tolist() == [0, 0.5, 0.5]
    assert datum.mask.sum() == 2


def test_completions_without_advantage_are_not_sent(store: ArtifactStore) -> None:
    manifest = completed(store, [1.0, 0.5, 0.0])

    assert [member.advantage for member in manifest.members] == [1.0, 0.0, -1.0]
    datums = group_datums(store, [manifest])
    assert [datum.advantages[-1] for datum in datums] == [1.0, -1.0]


def test_a_submission_is_recorded_with_its_groups_digests(store: ArtifactStore) -> None:
    completed(store, [1.0, 0.0])
    datums = prepare_submission(store, 2, 0, LeaseKey(0, 1), [KEY])
    manifest = store.get_json(submission_key(2, 0, LeaseKey(0, 1)))

    assert len(datums) == 2
    assert [group["key"] for group in manifest["groups"]] == ["groups/row-000017.0.json"]
    assert len(manifest["groups"][0]["sha256"]) == 64


def test_a_rollout_that_changed_since_is_not_trained_on(store: ArtifactStore) -> None:
    manifest = completed(store, [1.0, 0.0])
    store.put(rollout_key(KEY, 0), store.get(rollout_key(KEY, 1)))

    with pytest.raises(CorruptArtifactError, match="has changed since it was recorded"):
        group_datums(store, [manifest])
