"""A dedicated session through the unmodified SDK: opening, publication, fencing."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest

from activities.messages import LeaseRef, LoadCheckpoint, SaveCheckpoint
from everburn.emulator.models.base_model import TINY
from everburn.learning.rollout_file import write_rollout
from everburn.records.ids import GroupKey, LeaseKey
from everburn.records.keys import group_key, rollout_key
from everburn.records.provisioning import ProvisioningRecord, find_provisioning
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun, RolloutSample
from everburn.trainers import dedicated, fencing, serverless
from everburn.trainers.fencing import (
    Fingerprint,
    check_fingerprint,
    earlier_holders,
    put_fingerprint,
    record_fingerprint,
)
from everburn.trainers.protocol import (
    PromotionError,
    TrainerCapacityError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from support.activities import lease_operations
from support.emulator import RunningEmulator, running_emulator
from support.full_disk import FullDisk
from support.places import Place
from support.records import a_group, a_member, a_record
from support.sessions import ADAM, a_datum
from support.waiting import until


@pytest.fixture(scope="module")
def module_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    with running_emulator(tmp_path_factory.mktemp("dedicated")) as running:
        yield running


@pytest.fixture
def emulator(module_emulator: RunningEmulator) -> Iterator[RunningEmulator]:
    yield module_emulator
    module_emulator.mend()


@pytest.fixture
async def place(emulator: RunningEmulator, tmp_path: Path) -> AsyncIterator[Place]:
    """A run with a running job and a ready deployment."""
    place = Place(emulator, tmp_path)
    assert place.provisioning.advance().stage == "ready"
    yield place
    place.provisioning.clean_up()


def record_of(place: Place) -> ProvisioningRecord:
    record = find_provisioning(place.store)
    assert record is not None
    return record


async def test_a_published_snapshot_is_served(place: Place) -> None:
    from fireworks.training.sdk import FiretitanSamplingClient

    trainer = await place.open(1)
    for version in range(3):  # complete, then two deltas
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)
        snapshot = await trainer.publish(f"policy-000{version}-e1")
        await trainer.probe()
        (trained,) = await trainer.forward([[2, 3, 4, 5]])
        client = FiretitanSamplingClient.from_sampler_handle(snapshot.handle, api_key="fw_local")
        (scored,) = await client.deployment_sampler.sample_with_prompt_tokens(
            [2, 3, 4, 5], max_tokens=1, logprobs=True, echo=True
        )
        assert list(scored.sampling_logprobs[:3]) == pytest.approx(trained, abs=1e-4)
        assert snapshot.shared
        assert snapshot.path.startswith(f"policy-000{version}-e1-")
        assert "fw_local" not in snapshot.handle
    await trainer.close()


async def test_a_policy_that_was_published_as_a_delta_is_promoted_completely(place: Place) -> None:
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


async def test_a_full_disk_does_not_end_the_session(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk("holders/lease-000001-*", times=10)
    disk.install(monkeypatch)
    trainer = await place.open(1)
    assert disk.refused == 10
    (holder,) = place.store.keys("holders")
    assert re.fullmatch(r"holders/lease-000001-[0-9a-f]{16}\.json", holder)

    disk = FullDisk("fingerprints/*", times=10)
    disk.install(monkeypatch)
    await record_fingerprint(place.store, trainer, "state-0")
    assert disk.refused == 10
    await check_fingerprint(place.store, trainer, "state-0")
    await trainer.close()


async def test_an_earlier_holder_is_fenced_out_when_the_next_opens(
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


async def test_a_late_attempt_at_a_lease_does_not_hide_the_granted_one(
    emulator: RunningEmulator, place: Place
) -> None:
    """It was abandoned while opening, and another attempt got the same lease."""
    emulator.admin("POST", "unknowns", {"shares_full_parameters": True, "keeps_gradients": True})
    before = len(emulator.arrivals("create_model"))
    emulator.plan_fault("create_model", "delay", seconds=2)
    opening = asyncio.ensure_future(place.open(1))
    await until(lambda: len(emulator.arrivals("create_model")) > before)
    granted = await place.open(1)
    start = await granted.save_checkpoint("state-0")
    await (await opening).close()

    second = await place.open(2)
    with pytest.raises(TrainerStateLostError):
        await granted.optim_step(ADAM)
    await second.load_checkpoint(start)
    await second.forward_backward([a_datum()], "importance_sampling", {})
    assert (await second.optim_step(ADAM))["num_sequences"] == 1
    for trainer in (granted, second):
        await trainer.close()


async def test_a_holder_of_an_older_incarnation_is_fenced_out_whatever_its_lease_epoch(
    emulator: RunningEmulator, place: Place
) -> None:
    """The newer incarnation doesn't know the last leases of the older one."""
    emulator.admin("POST", "unknowns", {"shares_full_parameters": True, "keeps_gradients": True})
    former = await place.open(7)
    start = await former.save_checkpoint("state-0")
    await former.forward_backward([a_datum()], "importance_sampling", {})

    resumed = await place.open(5, incarnation=1)
    with pytest.raises(TrainerStateLostError):
        await former.optim_step(ADAM)
    await resumed.load_checkpoint(start)
    await resumed.forward_backward([a_datum()], "importance_sampling", {})
    assert (await resumed.optim_step(ADAM))["num_sequences"] == 1
    for trainer in (former, resumed):
        await trainer.close()


async def test_an_attempt_whose_grant_was_lost_is_fenced_out_when_the_next_opens(
    place: Place,
) -> None:
    ungranted = await place.open(1)
    granted = await place.open(1)
    with pytest.raises(TrainerStateLostError):
        await ungranted.probe()
    await granted.probe()
    for trainer in (ungranted, granted):
        await trainer.close()


async def test_a_job_that_refuses_to_unload_an_earlier_model_is_replaced(
    emulator: RunningEmulator, place: Place
) -> None:
    first = await place.open(1)
    start = await first.save_checkpoint("state-0")
    emulator.plan_fault("unload_model", "status", status=400)
    with pytest.raises(TrainerUnavailableError):
        await place.open(2)
    place.make_ready()
    record = record_of(place)
    assert record.job_id == f"{record.name}-2"
    third = await place.open(3)
    await third.load_checkpoint(start)
    await third.publish("policy-0000-e3")
    await third.probe()
    for trainer in (first, third):
        await trainer.close()


@pytest.fixture
def slow_unload(emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next unload waits for an operation of the model."""
    monkeypatch.setattr(dedicated, "FENCE_TIMEOUT", 0.2)
    emulator.plan_fault("unload_model", "delay", seconds=1)


@pytest.mark.usefixtures("slow_unload")
async def test_a_running_operation_of_an_earlier_holder_is_waited_for(place: Place) -> None:
    first = await place.open(1)
    with pytest.raises(TrainerCapacityError, match="still finishing an operation"):
        await place.open(2)
    assert place.provisioning.advance().stage == "ready"
    second = await place.open(2)
    for trainer in (first, second):
        assert trainer.session.startswith(f"{record_of(place).name}/")
        await trainer.close()


@pytest.mark.usefixtures("slow_unload")
async def test_a_job_with_an_operation_that_never_ends_is_deleted(
    emulator: RunningEmulator, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await place.open(1)
    with pytest.raises(TrainerCapacityError):
        await place.open(2)
    (holder,) = earlier_holders(place.store, record_of(place).job_id, LeaseKey(0, 2))
    assert holder.unload_requested_at is not None
    monkeypatch.setattr(dedicated, "RESULT_TIMEOUT", time.time() - holder.unload_requested_at)
    emulator.plan_fault("unload_model", "delay", seconds=1)
    with pytest.raises(TrainerUnavailableError) as caught:
        await place.open(2)
    assert type(caught.value) is TrainerUnavailableError
    assert emulator.emulator.managed.job(record_of(place).job_id).state == "JOB_STATE_DELETED"
    await first.close()


async def test_a_failed_unload_is_retried(emulator: RunningEmulator, place: Place) -> None:
    first = await place.open(1)
    emulator.plan_fault("retrieve_future", "status", status=410)
    with pytest.raises(TrainerUnavailableError):
        await place.open(2)
    second = await place.open(2)
    assert second.session.startswith(f"{record_of(place).name}/")
    for trainer in (first, second):
        await trainer.close()


async def test_a_request_that_may_have_been_applied_is_not_repeated(
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


async def test_a_failed_publication_reports_the_reason(
    emulator: RunningEmulator, place: Place
) -> None:
    trainer = await place.open(1)
    emulator.plan_fault("hot_load", "hotload_error")
    with pytest.raises(TrainerStateLostError, match="the weights can't be read"):
        await trainer.publish("policy-0000-e1")
    await trainer.close()


async def test_a_publication_times_out(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, deployment={"hotload_timeout": 0.2})
    place.provisioning.advance()
    trainer = await place.open(1)
    emulator.plan_fault("hot_load", "hotload_stuck")
    with pytest.raises(TrainerStateLostError, match=r"after 0\.2 s: stage loading, ready False"):
        await trainer.publish("policy-0000-e1")
    await trainer.close()
    place.provisioning.clean_up()


async def test_the_publication_timeout_includes_the_hotload_timeout(
    emulator: RunningEmulator, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serverless, "PUBLISH_TIMEOUT", 0.5)
    emulator.admin("POST", "hotload", {"seconds": 0.8})
    trainer = await place.open(1)
    await trainer.publish("policy-0000-e1")
    await trainer.probe()
    await trainer.close()


@pytest.mark.parametrize("ended", ["timeout", "lease"])
async def test_an_abandoned_publication_loads_nothing(
    emulator: RunningEmulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Literal["timeout", "lease"],
) -> None:
    """Its thread continues, and its load could replace the next lease's snapshot."""
    place = Place(emulator, tmp_path, deployment={"hotload_timeout": 0.1})
    assert place.provisioning.advance().stage == "ready"
    record = record_of(place)
    trainer = await place.open(1)
    before = emulator.arrivals("hot_load")
    threads = ThreadPoolExecutor()
    asyncio.get_running_loop().set_default_executor(threads)
    emulator.plan_fault("save_weights_for_sampler", "delay", seconds=0.5)
    if ended == "timeout":
        monkeypatch.setattr(serverless, "PUBLISH_TIMEOUT", 0.1)
        with pytest.raises(TrainerStateLostError, match="no result in time"):
            await trainer.publish("policy-0000-e1")
    else:
        publishing = asyncio.ensure_future(trainer.publish("policy-0000-e1"))
        await until(lambda: not emulator.admin("GET", "faults")["faults"])
        await trainer.close()
        with pytest.raises(TrainerStateLostError, match="its lease has ended"):
            await publishing
    threads.shutdown()  # waits for the publication's thread
    assert len(emulator.emulator.managed.exports(record.job_id)) == 1
    assert emulator.arrivals("hot_load") == before
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor())
    await trainer.close()
    place.provisioning.clean_up()


async def test_a_replaced_snapshot_is_detected(place: Place) -> None:
    from fireworks.training.sdk import DeploymentManager

    trainer = await place.open(1)
    first = await trainer.publish("policy-0000-e1")
    await trainer.publish("policy-0001-e1")
    record = record_of(place)
    with DeploymentManager(api_key="fw_local", base_url=place.config.base_url or "") as manager:
        manager.hotload(record.deployment_id, TINY, first.path)
    with pytest.raises(TrainerStateLostError, match=r"serves policy-0000-e1-.*, not policy-0001"):
        await trainer.probe()
    await trainer.close()


async def test_a_state_that_differs_from_the_saved_one_is_detected(place: Place) -> None:
    trainer = await place.open(1)
    tokens = [2, 3, 4, 5]
    (logprobs,) = await trainer.forward([tokens])
    fingerprint = Fingerprint(checkpoint="c", tokens=tokens, logprobs=logprobs)
    put_fingerprint(place.store, fingerprint)
    await check_fingerprint(place.store, trainer, "c")
    await check_fingerprint(place.store, trainer, "another without a fingerprint")
    await trainer.forward_backward([a_datum()], "importance_sampling", {})
    await trainer.optim_step(ADAM)
    with pytest.raises(TrainerStateLostError, match="another holder may have changed the weights"):
        await check_fingerprint(place.store, trainer, "c")
    await trainer.close()


async def test_the_initial_state_has_a_fingerprint(place: Place) -> None:
    """It is saved before any completion exists, and recovery may load it."""
    trainer = await place.open(1)
    operations, ref = (
        lease_operations(trainer, place.run),
        LeaseRef(run=place.run, incarnation=0, lease_epoch=1),
    )
    paths = []
    for step in range(2):
        order = SaveCheckpoint(lease=ref, step=step, version=step, name=f"state-{step}-e1")
        paths.append((await operations.save_checkpoint(order)).path)
        await trainer.forward_backward([a_datum()], "importance_sampling", {})
        await trainer.optim_step(ADAM)
    assert len(place.store.keys("fingerprints")) == 2
    load_0 = LoadCheckpoint(lease=ref, step=0, path=paths[0])
    await operations.load_checkpoint(load_0)
    # A service that loads the wrong state.
    load = trainer.load_checkpoint
    trainer.load_checkpoint = lambda path: load(paths[1])  # type: ignore[method-assign]
    with pytest.raises(TrainerStateLostError, match="another holder may have changed the weights"):
        await lease_operations(trainer, place.run).load_checkpoint(load_0)
    await trainer.close()


async def test_the_store_is_read_in_threads(
    emulator: RunningEmulator, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop sends the lease's heartbeats, and listing tens of thousands of groups in an
    object store takes seconds."""
    job = {"job_id": record_of(place).job_id}  # another's job: the case with the most reads
    attached = Place(emulator, tmp_path / "attached", trainer=job)
    assert attached.provisioning.advance().stage == "ready"
    stored_config(attached.run)  # once per process
    on_loop: list[str] = []
    in_threads: list[str] = []
    loop = threading.get_ident()
    for method in ("keys", "get", "exists"):
        original = getattr(ArtifactStore, method)

        def watched(
            store: ArtifactStore, key: str, method: str = method, original: Any = original
        ) -> Any:
            (on_loop if threading.get_ident() == loop else in_threads).append(f"{method} {key}")
            return original(store, key)

        monkeypatch.setattr(ArtifactStore, method, watched)
    trainer = await attached.open(1)
    operations, ref = (
        lease_operations(trainer, attached.run),
        LeaseRef(run=attached.run, incarnation=0, lease_epoch=1),
    )
    order = SaveCheckpoint(lease=ref, step=0, version=0, name="state-0")
    saved = await operations.save_checkpoint(order)
    await operations.load_checkpoint(LoadCheckpoint(lease=ref, step=0, path=saved.path))
    await trainer.close()
    assert {"get provisioning.json", "keys checkpoints", "keys groups"} <= set(in_threads)
    assert not on_loop
    attached.provisioning.clean_up()


async def test_a_fingerprint_has_a_limited_number_of_tokens(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "MAX_SEQUENCE", 4)
    tokens = [2, 3, 4, 5, 6, 7]
    record_completion(place.store, tokens)
    trainer = await place.open(1)
    await record_fingerprint(place.store, trainer, "c")
    (key,) = place.store.keys("fingerprints")
    assert Fingerprint.model_validate(place.store.get_json(key)).tokens == tokens[:4]
    await check_fingerprint(place.store, trainer, "c")
    # A longer one is checked completely.
    (logprobs,) = await trainer.forward([tokens])
    put_fingerprint(place.store, Fingerprint(checkpoint="c", tokens=tokens, logprobs=logprobs))
    await check_fingerprint(place.store, trainer, "c")
    await trainer.close()


def record_completion(store: ArtifactStore, tokens: list[int]) -> None:
    key, count = GroupKey(cursor=3), len(tokens)
    mask = [0, *[1] * (count - 1)]
    run = RolloutRun([RolloutSample(tokens, [0.0] * count, mask, 1.0)])
    stored = write_rollout(store, rollout_key(key, 0), a_record(cursor=3), run)
    group = a_group(key, [a_member(stored, tokens=count, trained_tokens=count - 1)])
    store.put_json(group_key(key), group.model_dump(mode="json"))


# The job and the deployment


def test_advance_is_idempotent(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path)
    before = emulator.admin("GET", "state")
    for _ in range(2):
        assert place.provisioning.advance().stage == "ready"
    after = emulator.admin("GET", "state")
    assert len(after["jobs"]) == len(before["jobs"]) + 1
    assert len(after["deployments"]) == len(before["deployments"]) + 1
    assert place.provisioning.clean_up() == place.provisioning.clean_up()


@pytest.mark.parametrize("polls", [0, 1])  # the status request fails, or the deletion
def test_a_failed_deployment_cleanup_does_not_keep_the_job(
    emulator: RunningEmulator, tmp_path: Path, polls: int
) -> None:
    place = Place(emulator, tmp_path)
    assert place.provisioning.advance().stage == "ready"
    record = record_of(place)
    emulator.plan_fault(record.deployment_id, "status", status=400, after=polls)
    done = f"trainer job {record.job_id} is deleted"
    with pytest.raises(TrainerUnavailableError, match=rf"^deployment {record.name}.*; {done}$"):
        place.provisioning.clean_up()
    assert emulator.emulator.managed.job(record.job_id).state == "JOB_STATE_DELETED"
    assert place.provisioning.clean_up() == f"deployment {record.deployment_id} is deleted; {done}"


def test_failed_cleanups_are_named(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path)
    assert place.provisioning.advance().stage == "ready"
    record = record_of(place)
    assert record.job_id == record.deployment_id  # the status request of each fails
    emulator.plan_fault(record.name, "status", status=400, count=2)
    refused = rf"{record.name}: .*HTTP 400.*"
    message = rf"^deployment {refused}; trainer job {refused}$"
    with pytest.raises(TrainerUnavailableError, match=message):
        place.provisioning.clean_up()
    place.provisioning.clean_up()


def test_a_deleted_job_is_replaced(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path)
    place.provisioning.advance()
    place.provisioning.clean_up()
    assert place.provisioning.advance().stage == "ready"
    record = record_of(place)
    assert record.job_id == f"{record.name}-2"
    place.provisioning.clean_up()


def test_a_deployment_switches_to_the_runs_next_job(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    place = Place(emulator, tmp_path, deployment={"cleanup": "scale_to_zero"})
    place.provisioning.advance()
    place.provisioning.clean_up()
    place.make_ready()
    record = record_of(place)
    (deployment,) = (
        deployment
        for deployment in emulator.emulator.managed.deployments()
        if deployment.deployment_id == record.deployment_id
    )
    assert deployment.request["hotLoadTrainerJob"].endswith(record.job_id)
    assert deployment.replicas == 1


def test_a_stopped_job_is_resumed_and_the_reason_is_reported(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    place = Place(emulator, tmp_path, lora_rank=4)
    place.provisioning.advance()
    record = record_of(place)
    emulator.admin(
        "POST", f"jobs/{record.job_id}", {"state": "JOB_STATE_CANCELLED", "message": "idle"}
    )
    readiness = place.provisioning.advance()
    assert (readiness.stage, readiness.resumed) == ("starting", True)
    assert "cancelled (idle)" in readiness.text
    assert place.provisioning.advance().stage == "ready"
    place.provisioning.clean_up()


def test_the_deployment_can_own_the_snapshots(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, deployment={"weight_sync_scope": "per_deployment"})
    assert place.provisioning.advance().stage == "ready"
    record = record_of(place)
    job = emulator.emulator.managed.job(record.job_id)
    assert job.request["hotLoadDeploymentId"] == record.deployment_id
    place.provisioning.clean_up()


def test_a_refused_request_is_reported(emulator: RunningEmulator, tmp_path: Path) -> None:
    place = Place(emulator, tmp_path, base_model="accounts/nobody/models/none")
    with pytest.raises(TrainerRejectedError, match=r"HTTP 400.*accounts/nobody/models/none"):
        place.provisioning.advance()


def test_an_unreachable_control_plane_is_reported(
    emulator: RunningEmulator, tmp_path: Path, dead_url: str
) -> None:
    place = Place(emulator, tmp_path, base_url=dead_url)
    with pytest.raises(TrainerUnavailableError, match=f"nothing answers at {dead_url}"):
        place.provisioning.advance()
