"""A dedicated session through the unmodified SDK: opened, published, fenced."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from activities.messages import LeaseRef, LoadCheckpoint, SaveCheckpoint
from activities.trainer_operations import load_checkpoint, save_checkpoint
from everburn.emulator.base_model import TINY
from everburn.provisioning import find_resources
from everburn.trainers import (
    PromotionError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from everburn.trainers.fencing import (
    Fingerprint,
    check_fingerprint,
    put_fingerprint,
    record_fingerprint,
)
from everburn.trainers.lease import Lease
from support.emulator import RunningEmulator, running_emulator
from support.full_disk import FullDisk
from support.places import Place
from support.sessions import ADAM, a_datum


@pytest.fixture(scope="module")
def own_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    with running_emulator(tmp_path_factory.mktemp("dedicated")) as running:
        yield running


@pytest.fixture
def emulator(own_emulator: RunningEmulator) -> Iterator[RunningEmulator]:
    yield own_emulator
    own_emulator.mend()


@pytest.fixture
async def place(emulator: RunningEmulator, tmp_path: Path) -> AsyncIterator[Place]:
    """With a running job and a ready deployment."""
    place = Place(emulator, tmp_path)
    assert place.resources.advance().stage == "ready"
    yield place
    place.resources.clean_up()


async def test_what_is_published_is_served(place: Place) -> None:
    from fireworks.training.sdk import FiretitanSamplingClient

    trainer = await place.open(1)
    for version in range(3):  # whole, then two differences
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)
        snapshot = await trainer.publish(f"policy-000{version}-e1")
        await trainer.probe()
        (own,) = await trainer.forward([[2, 3, 4, 5]])
        client = FiretitanSamplingClient.from_sampler_handle(snapshot.handle, api_key="fw_local")
        (scored,) = await client.deployment_sampler.sample_with_prompt_tokens(
            [2, 3, 4, 5], max_tokens=1, logprobs=True, echo=True
        )
        assert list(scored.sampling_logprobs[:3]) == pytest.approx(own, abs=1e-4)
        assert snapshot.shared
        assert snapshot.path.startswith(f"policy-000{version}-e1-")
        assert "fw_local" not in snapshot.handle
    await trainer.close()


async def test_a_policy_that_was_published_as_a_difference_is_promoted_whole(place: Place) -> None:
    trainer = await place.open(1)
    for version in range(2):
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)
        snapshot = await trainer.publish(f"policy-000{version}-e1")
    name = "accounts/everburn/models/all-parameters"
    assert await trainer.promote(snapshot.path, "all-parameters", again=False) == name
    with pytest.raises(PromotionError, match="exists already"):
        await trainer.promote(snapshot.path, "all-parameters", again=False)
    assert await trainer.promote(snapshot.path, "all-parameters", again=True) == name
    await trainer.close()


async def test_a_full_disk_costs_no_session(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk("holders/epoch-000001.json", times=10)
    disk.install(monkeypatch)
    trainer = await place.open(1)
    assert disk.refused == 10
    (holder,) = place.store.keys("holders")
    assert holder == "holders/epoch-000001.json"

    disk = FullDisk("fingerprints/*", times=10)
    disk.install(monkeypatch)
    await record_fingerprint(place.store, trainer, "state-0")
    assert disk.refused == 10
    await check_fingerprint(place.store, trainer, "state-0")
    await trainer.close()


async def test_an_earlier_holder_is_out_once_the_next_has_opened(
    emulator: RunningEmulator, place: Place
) -> None:
    emulator.admin("POST", "unknowns", {"shares_full_parameters": True, "keeps_gradients": True})
    first = await place.open(1)
    start = await first.save_checkpoint("state-0")
    await first.forward_backward([a_datum()], "importance_sampling", {})
    second = await place.open(2)
    with pytest.raises(TrainerStateLostError):
        await first.optim_step(ADAM)
    with pytest.raises(TrainerStateLostError):
        await first.probe()
    await second.load_checkpoint(start)
    await second.forward_backward([a_datum(-1.0)], "importance_sampling", {})
    metrics = await second.optim_step(ADAM)
    assert (metrics["num_sequences"], metrics["step"]) == (1, 1)
    for trainer in (first, second):
        await trainer.close()


async def test_a_job_whose_old_model_does_not_unload_is_replaced(
    emulator: RunningEmulator, place: Place
) -> None:
    first = await place.open(1)
    start = await first.save_checkpoint("state-0")
    emulator.plan_fault("unload_model", "status", status=400)
    with pytest.raises(TrainerUnavailableError):
        await place.open(2)
    place.make_ready()
    record = find_resources(place.store)
    assert record is not None
    assert record.job_id == f"{record.name}-2"
    third = await place.open(3)
    await third.load_checkpoint(start)
    await third.publish("policy-0000-e3")
    await third.probe()
    for trainer in (first, third):
        await trainer.close()


async def test_a_request_that_may_have_been_applied_is_not_sent_again(
    emulator: RunningEmulator, place: Place
) -> None:
    emulator.admin("POST", "unknowns", {"applies_repetitions": True})
    trainer = await place.open(1)
    emulator.plan_fault("forward_backward", "drop", applied=True)
    with pytest.raises(TrainerStateLostError, match="may have been applied, and isn't sent again"):
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
    session = trainer.session.rpartition("/")[2]
    (model,) = emulator.admin("GET", "state")["sessions"][session]["models"].values()
    assert model["applied"] == {"forward_backward": 1}
    await trainer.close()


async def test_a_publication_that_fails_says_why(emulator: RunningEmulator, place: Place) -> None:
    trainer = await place.open(1)
    emulator.plan_fault("hot_load", "hotload_error")
    with pytest.raises(TrainerStateLostError, match="the weights can't be read"):
        await trainer.publish("policy-0000-e1")
    await trainer.close()


async def test_a_publication_has_a_deadline(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, deployment={"hotload_timeout": 0.2})
    place.resources.advance()
    trainer = await place.open(1)
    emulator.plan_fault("hot_load", "hotload_stuck")
    with pytest.raises(TrainerStateLostError, match=r"after 0\.2 s: stage loading, ready False"):
        await trainer.publish("policy-0000-e1")
    await trainer.close()
    place.resources.clean_up()


async def test_another_snapshot_in_the_place_of_the_sessions_is_noticed(place: Place) -> None:
    from fireworks.training.sdk import DeploymentManager

    trainer = await place.open(1)
    first = await trainer.publish("policy-0000-e1")
    await trainer.publish("policy-0001-e1")
    resources = find_resources(place.store)
    assert resources is not None
    with DeploymentManager(api_key="fw_local", base_url=place.config.base_url or "") as manager:
        manager.hotload(resources.deployment_id, TINY, first.path)
    with pytest.raises(TrainerStateLostError, match=r"serves policy-0000-e1-.*, not policy-0001"):
        await trainer.probe()
    await trainer.close()


async def test_a_state_that_is_not_what_was_saved_is_noticed(place: Place) -> None:
    trainer = await place.open(1)
    tokens = [2, 3, 4, 5]
    (logprobs,) = await trainer.forward([tokens])
    fingerprint = Fingerprint(checkpoint="c", tokens=tokens, logprobs=logprobs)
    put_fingerprint(place.store, fingerprint)
    await check_fingerprint(place.store, trainer, "c")
    await check_fingerprint(place.store, trainer, "another, of which nothing is known")
    await trainer.forward_backward([a_datum()], "importance_sampling", {})
    await trainer.optim_step(ADAM)
    with pytest.raises(TrainerStateLostError, match="another holder may have changed the weights"):
        await check_fingerprint(place.store, trainer, "c")
    await trainer.close()


async def test_the_initial_state_is_known_again_or_its_loading_fails(place: Place) -> None:
    """Nothing has been sampled when it is saved, and it may be all that recovery ever loads."""
    trainer = await place.open(1)
    lease, ref = Lease(1, trainer), LeaseRef(run=place.run, epoch=1)
    paths = []
    for step in range(2):
        order = SaveCheckpoint(lease=ref, step=step, version=step, name=f"state-{step}-e1")
        paths.append((await save_checkpoint(lease, order)).path)
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)
    assert len(place.store.keys("fingerprints")) == 2
    load_0 = LoadCheckpoint(lease=ref, step=0, path=paths[0])
    await load_checkpoint(lease, load_0)
    # A service that mixes up its states.
    load = trainer.load_checkpoint
    trainer.load_checkpoint = lambda path: load(paths[1])  # type: ignore[method-assign]
    with pytest.raises(TrainerStateLostError, match="another holder may have changed the weights"):
        await load_checkpoint(lease, load_0)
    await trainer.close()


# The job and the deployment


def test_looking_again_makes_nothing_twice(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path)
    before = emulator.admin("GET", "state")
    for _ in range(2):
        assert place.resources.advance().stage == "ready"
    after = emulator.admin("GET", "state")
    assert len(after["jobs"]) == len(before["jobs"]) + 1
    assert len(after["deployments"]) == len(before["deployments"]) + 1
    assert place.resources.clean_up() == place.resources.clean_up()


def test_a_deleted_job_is_followed_by_another(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path)
    place.resources.advance()
    place.resources.clean_up()
    assert place.resources.advance().stage == "ready"
    record = find_resources(place.store)
    assert record is not None
    assert record.job_id == f"{record.name}-2"
    place.resources.clean_up()


def test_a_deployment_follows_the_run_to_its_next_job(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    place = Place(emulator, tmp_path, deployment={"cleanup": "scale_to_zero"})
    place.resources.advance()
    place.resources.clean_up()
    place.make_ready()
    record = find_resources(place.store)
    assert record is not None
    (deployment,) = (
        each
        for each in emulator.emulator.managed.deployments()
        if each.deployment_id == record.deployment_id
    )
    assert deployment.request["hotLoadTrainerJob"].endswith(record.job_id)
    assert deployment.replicas == 1


def test_a_stopped_job_is_resumed_and_its_end_is_told(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    place = Place(emulator, tmp_path, lora_rank=4)
    place.resources.advance()
    record = find_resources(place.store)
    assert record is not None
    emulator.admin(
        "POST", f"jobs/{record.job_id}", {"state": "JOB_STATE_CANCELLED", "message": "idle"}
    )
    found = place.resources.advance()
    assert (found.stage, found.resumed) == ("starting", True)
    assert "cancelled (idle)" in found.text
    assert place.resources.advance().stage == "ready"
    place.resources.clean_up()


def test_the_deployment_may_own_the_snapshots(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, deployment={"weight_sync_scope": "per_deployment"})
    assert place.resources.advance().stage == "ready"
    record = find_resources(place.store)
    assert record is not None
    job = emulator.emulator.managed.job(record.job_id)
    assert job.request["hotLoadDeploymentId"] == record.deployment_id
    place.resources.clean_up()


def test_what_is_refused_is_said(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, base_model="accounts/nobody/models/none")
    with pytest.raises(TrainerRejectedError, match=r"HTTP 400.*accounts/nobody/models/none"):
        place.resources.advance()


def test_nobody_answers(emulator: RunningEmulator, tmp_path: Path, dead_url: str) -> None:
    place = Place(emulator, tmp_path, base_url=dead_url)
    with pytest.raises(TrainerUnavailableError, match=f"nothing answers at {dead_url}"):
        place.resources.advance()
