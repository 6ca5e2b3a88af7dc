"""The probe after each publication, against the emulator."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everburn.config import ConfigError, forked, reconfigured
from everburn.learning.rollout_file import write_rollout
from everburn.learning.submissions import prepare_submission
from everburn.records.ids import GroupKey, LeaseKey
from everburn.records.keys import group_key, rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun, RolloutSample
from everburn.trainers.probe import (
    INITIAL_PROBE,
    SCORED_TOKENS,
    check_served,
    recorded_completion,
)
from everburn.trainers.protocol import PublicationMismatchError
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.records import a_group, a_member, a_record
from support.sessions import ADAM, a_config, a_datum

TOKENS = [2, 3, 4, 5, 6, 7]


@pytest.fixture
async def trainer(emulator: RunningEmulator) -> AsyncIterator[ServerlessTrainer]:
    session = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield session
    await session.close()


async def train(trainer: ServerlessTrainer) -> None:
    for _ in range(3):
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)


async def test_a_published_snapshot_serves_the_trained_weights(trainer: ServerlessTrainer) -> None:
    await train(trainer)
    snapshot = await trainer.publish("policy-0001-e1")
    assert await check_served(trainer, snapshot, TOKENS, 2, 0.002) < 1e-4


async def test_stale_weights_are_detected(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    await trainer.publish("policy-0000-e1")
    emulator.plan_fault("save_weights_for_sampler", "stale_weights")
    await train(trainer)
    stale = await trainer.publish("policy-0001-e1")
    with pytest.raises(PublicationMismatchError, match=r"policy-0001-e1.* over 4 tokens") as caught:
        await check_served(trainer, stale, TOKENS, 2, 0.002)
    assert "only a fork can tolerate more" in str(caught.value)


def test_only_a_fork_can_raise_the_tolerance() -> None:
    """As the error text says."""
    config = a_config("http://127.0.0.1:1")
    assert forked(config, config.model_dump(mode="json") | {"publication_tolerance": 0.5})
    with pytest.raises(
        ConfigError, match="publication_tolerance can't change while a run continues"
    ):
        reconfigured(config, {"publication_tolerance": 0.5})


async def test_the_probe_changes_neither_gradients_nor_weights(
    emulator: RunningEmulator, trainer: ServerlessTrainer
) -> None:
    paths = []
    for probed in (False, True):
        session = await ServerlessTrainer.open(a_config(emulator.base_url, seed=5))
        snapshot = await session.publish("policy-0000-e1")
        await session.forward_backward([a_datum()], "grpo", {})
        if probed:
            await check_served(session, snapshot, TOKENS, 2, 0.002)
        await session.optim_step(ADAM)
        paths.append(await session.save_checkpoint("state-1"))
        await session.close()
    first, second = (emulator.saved_weights(path) for path in paths)
    assert all((first[name] == second[name]).all() for name in first)


def test_the_probe_uses_a_recorded_completion_of_the_step(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path))
    key = GroupKey(cursor=3)
    tokens = [1, 2, *range(3, 200)]
    segment = RolloutSample(tokens, [0.0] * len(tokens), [0, 0] + [1] * 197, 1.0)
    stored = write_rollout(store, rollout_key(key, 0), a_record(cursor=3), RolloutRun([segment]))
    group = a_group(key, [a_member(stored, tokens=199, trained_tokens=197)])
    store.put_json(group_key(key), group.model_dump(mode="json"))
    prepare_submission(store, 1, 0, LeaseKey(0, 2), [key])

    assert recorded_completion(store, 1, LeaseKey(0, 2)) == (tokens[: 2 + SCORED_TOKENS], 2)
    assert recorded_completion(store, 0, LeaseKey(0, 2)) == (INITIAL_PROBE, 1)
