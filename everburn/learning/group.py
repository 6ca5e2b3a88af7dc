"""Group completion: the outcome of a prompt group once all its completions have ended.

Owns survival, advantages, the dynamic filter and the group's manifest. Doesn't own retries
(workflows) or datums (datums.py).
"""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from everburn.learning.advantages import AdvantageFunction, group_zscore, sample_std
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, GroupOutcome, GroupResult, RolloutOutcome, StoredRef
from everburn.records.keys import GROUPS, group_key, rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun


class Member(BaseModel):
    """A surviving completion of a group."""

    model_config = ConfigDict(extra="forbid")

    completion: int
    stored: StoredRef
    reward: float
    advantage: float
    segments: int
    tokens: int
    """All tokens of its segments."""
    trained_tokens: int
    row_index: int
    epoch: int


class GroupManifest(BaseModel):
    """A completed group: its survivors with their advantages, and its outcome.

    rejected: the row is rejected too. False for an accepted group, and for an incomplete one whose
        row may be retried.
    """

    model_config = ConfigDict(extra="forbid")

    key: GroupKey
    version: int
    outcome: GroupOutcome
    rejected: bool
    completions: int
    members: list[Member]
    lost: list[RolloutOutcome]
    """The completions that didn't survive, and why."""

    @property
    def datums(self) -> int:
        """Segments with a nonzero advantage, which are sent to the trainer."""
        return sum(member.segments for member in self.members if member.advantage)

    @property
    def result(self) -> GroupResult:
        return GroupResult(
            key=self.key,
            version=self.version,
            outcome=self.outcome,
            survivors=len(self.members),
            datums=self.datums,
            reward_sum=sum(self.rewards),
        )

    @property
    def rewards(self) -> list[float]:
        return [member.reward for member in self.members]

    @property
    def reward_std(self) -> float:
        return sample_std(self.rewards)


class Group(BaseModel):
    """The argument of a dynamic filter."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    row: dict[str, Any]
    rewards: list[float]
    rollouts: list[RolloutRun]
    version: int


def judge_group(
    store: ArtifactStore,
    key: GroupKey,
    version: int,
    outcomes: list[RolloutOutcome],
    min_group_size: int,
    last: bool,
    row: Callable[[], dict[str, Any]],
    dynamic_filter: Callable[[Group], bool] | None,
    advantages_of: AdvantageFunction = group_zscore,
) -> GroupManifest:
    """Decide a group's outcome, or find the manifest of an earlier attempt. Runs in a thread:
    `dynamic_filter` and `advantages_of` may be user code of any duration.

    outcomes: one per completion, in any order. min_group_size counts surviving completions. last:
        no retry follows if there are too few.
    """
    found = find_group(store, key)
    if found is not None:
        return found
    survivors = sorted(o.completion for o in outcomes if o.status == "succeeded")
    stored = [store.ref(rollout_key(key, completion)) for completion in survivors]
    loaded = [read_rollout(store, ref) for ref in stored]
    rewards = [float(run.segments[0].reward) for _, run in loaded]
    advantages = advantages_of(rewards) if survivors else []
    outcome: GroupOutcome = "accepted"
    if len(survivors) < min_group_size:
        outcome = "incomplete"
    elif dynamic_filter is not None:
        group = Group(
            row=row(), rewards=rewards, rollouts=[run for _, run in loaded], version=version
        )
        outcome = "accepted" if dynamic_filter(group) else "filtered"
    return GroupManifest(
        key=key,
        version=version,
        outcome=outcome,
        rejected=outcome == "filtered" or (outcome == "incomplete" and last),
        completions=len(outcomes),
        members=[
            Member(
                completion=completion,
                stored=ref,
                reward=reward,
                advantage=advantage,
                segments=len(run.segments),
                tokens=sum(len(s.tokens) for s in run.segments),
                trained_tokens=sum(sum(map(int, s.loss_mask[1:])) for s in run.segments),
                row_index=record.row_index,
                epoch=record.epoch,
            )
            for completion, ref, (record, run), reward, advantage in zip(
                survivors, stored, loaded, rewards, advantages, strict=True
            )
        ],
        lost=[outcome for outcome in outcomes if outcome.status != "succeeded"],
    )


def keep_group(
    store: ArtifactStore, manifest: GroupManifest, last_check: Callable[[], None] = lambda: None
) -> GroupManifest:
    """Write a group's manifest unless it exists; returns the stored one.

    last_check: called before the manifest is written; raises if the run no longer waits for it.
    """
    last_check()
    store.put_json(group_key(manifest.key), manifest.model_dump(mode="json"), once=True)
    return load_group(store, manifest.key)


def skip_group(store: ArtifactStore, key: GroupKey, version: int, completions: int) -> None:
    """Record that a failed group isn't retried."""
    skipped = GroupManifest(
        key=key,
        version=version,
        outcome="skipped",
        rejected=True,
        completions=completions,
        members=[],
        lost=[],
    )
    keep_group(store, skipped)


def find_group(store: ArtifactStore, key: GroupKey) -> GroupManifest | None:
    """The manifest of a group, if it has been completed."""
    found = store.find_json(group_key(key))
    return None if found is None else GroupManifest.model_validate(found)


def load_group(store: ArtifactStore, key: GroupKey) -> GroupManifest:
    """The manifest of a completed group. Raises FileNotFoundError."""
    return GroupManifest.model_validate(store.get_json(group_key(key)))


def completed_groups(store: ArtifactStore) -> list[GroupKey]:
    """All completed groups, sorted by row, then oldest first."""
    groups = (GroupKey.named(PurePosixPath(key).stem) for key in store.keys(GROUPS))
    return sorted(groups, key=lambda group: group.sort_key)


def all_groups(store: ArtifactStore) -> Iterator[GroupManifest]:
    """The manifests of all completed groups."""
    return (load_group(store, key) for key in completed_groups(store))
