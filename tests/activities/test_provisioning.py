"""Errors of the activities that manage a trainer job and a deployment."""

from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from activities.liveness import RunLiveness
from activities.provisioning import ProvisioningActivities
from everburn.records.ids import RunRef
from everburn.records.provisioning import RECORD_KEY, find_provisioning
from everburn.records.run_folder import CONFIG_KEY
from everburn.records.store import ArtifactStore
from support.activities import execute
from support.emulator import RunningEmulator
from support.full_disk import FullDisk
from support.places import Place


@pytest.fixture
async def activities(monkeypatch: pytest.MonkeyPatch) -> ProvisioningActivities:
    """Activities of a run that is open; they send nothing to a server."""

    async def is_alive(self: RunLiveness, run: RunRef, incarnation: int | None = None) -> bool:
        return True

    monkeypatch.setattr(RunLiveness, "is_alive", is_alive)
    return ProvisioningActivities(await Client.connect("127.0.0.1:1", lazy=True))


@pytest.mark.parametrize("activity", ["advance_provisioning", "clean_up_provisioning"])
@pytest.mark.parametrize(
    ("corrupt", "kind", "final"),
    [(False, "StoreError", False), (True, "CorruptArtifactError", True)],
)
async def test_a_failing_store_is_retried(
    tmp_path: Path,
    activities: ProvisioningActivities,
    activity: str,
    corrupt: bool,
    kind: str,
    final: bool,
):
    """A job and a deployment cost money until they are given back."""
    run = RunRef(store=str(tmp_path), id="run")
    # A folder in place of a file can't be read.
    ArtifactStore.of(run).put(CONFIG_KEY if corrupt else f"{CONFIG_KEY}/file", b"{")
    with pytest.raises(ApplicationError, match=CONFIG_KEY) as caught:
        await execute(getattr(activities, activity), run)
    assert (caught.value.type, caught.value.non_retryable) == (kind, final)


async def test_a_store_failure_is_not_reported_as_a_control_plane_failure(
    emulator: RunningEmulator, tmp_path: Path, activities: ProvisioningActivities
):
    place = Place(emulator, tmp_path)
    place.store.put(f"{RECORD_KEY}/file", b"")
    with pytest.raises(
        ApplicationError, match=r"^StoreError: can't read .*Is a directory"
    ) as caught:
        await execute(activities.advance_provisioning, place.run)
    assert (caught.value.type, caught.value.non_retryable) == ("StoreError", False)


@pytest.mark.parametrize("resumed", [True, False])
async def test_cleanup_keeps_what_a_resumed_incarnation_uses(
    emulator: RunningEmulator,
    tmp_path: Path,
    activities: ProvisioningActivities,
    monkeypatch: pytest.MonkeyPatch,
    resumed: bool,
):
    """The lease of the former, terminated incarnation requests the cleanup late."""
    place = Place(emulator, tmp_path)
    place.make_ready()
    record = find_provisioning(place.store)
    assert record is not None

    async def is_alive(self: RunLiveness, run: RunRef, incarnation: int | None = None) -> bool:
        assert run == place.run
        return resumed

    monkeypatch.setattr(RunLiveness, "is_alive", is_alive)
    said = await execute(activities.clean_up_provisioning, place.run, True)
    state = emulator.admin("GET", "state")
    assert (record.deployment_id in state["deployments"]) == resumed
    assert (state["jobs"][record.job_id] == "JOB_STATE_RUNNING") == resumed
    assert (said == "the run continues") == resumed
    # The run itself is still open when it requests its cleanup.
    await execute(activities.clean_up_provisioning, place.run)
    assert emulator.admin("GET", "state")["jobs"][record.job_id] == "JOB_STATE_DELETED"


async def test_nothing_is_given_back_while_it_is_unknown_whether_the_run_is_open(
    emulator: RunningEmulator,
    tmp_path: Path,
    activities: ProvisioningActivities,
    monkeypatch: pytest.MonkeyPatch,
):
    """The activity is retried."""
    place = Place(emulator, tmp_path)
    place.make_ready()
    record = find_provisioning(place.store)
    assert record is not None

    async def is_alive(self: RunLiveness, run: RunRef, incarnation: int | None = None) -> bool:
        raise RPCError("unavailable", RPCStatusCode.UNAVAILABLE, b"")

    monkeypatch.setattr(RunLiveness, "is_alive", is_alive)
    with pytest.raises(ApplicationError) as caught:
        await execute(activities.clean_up_provisioning, place.run, True)
    assert (caught.value.type, caught.value.non_retryable) == ("RPCError", False)
    assert emulator.admin("GET", "state")["jobs"][record.job_id] == "JOB_STATE_RUNNING"
    place.provisioning.clean_up()


async def test_a_full_disk_is_waited_for(
    emulator: RunningEmulator,
    tmp_path: Path,
    activities: ProvisioningActivities,
    monkeypatch: pytest.MonkeyPatch,
):
    place = Place(emulator, tmp_path)
    disk = FullDisk(RECORD_KEY, times=10)
    disk.install(monkeypatch)
    ready = await execute(activities.advance_provisioning, place.run)
    assert ready.stage != "unwanted"
    assert disk.refused == 10
    assert find_provisioning(place.store) is not None
