"""Errors of the control plane for a dedicated run: the table of errors, by emulator faults
through the unmodified SDK."""

import itertools
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from everburn.records.provisioning import find_provisioning
from everburn.trainers import dedicated
from everburn.trainers import hotload as hotload_module
from everburn.trainers.dedicated import DedicatedTrainer
from everburn.trainers.protocol import (
    KeyRefusedError,
    QuotaExceededError,
    TrainerCapacityError,
    TrainerError,
    TrainerFailedError,
    TrainerRejectedError,
    TrainerStateLostError,
    TrainerUnavailableError,
)
from support.emulator import RunningEmulator
from support.places import Place
from support.waiting import until

CLOSED: list[tuple[dict[str, Any], type[TrainerError], str]] = [
    ({"kind": "status", "status": 401}, KeyRefusedError, "the API key in MY_KEY is refused"),
    ({"kind": "status", "status": 403}, KeyRefusedError, "the API key in MY_KEY lacks the perm"),
    ({"kind": "status", "status": 402}, QuotaExceededError, "add credit"),
]
OPENING = [
    *CLOSED,
    ({"kind": "status", "status": 422}, TrainerRejectedError, "injected fault"),
    ({"kind": "status", "status": 409}, TrainerCapacityError, "no capacity"),
    ({"kind": "status", "status": 425}, TrainerUnavailableError, "injected fault"),
    ({"kind": "malformed"}, TrainerUnavailableError, "JSONDecodeError"),
    ({"kind": "drop"}, TrainerUnavailableError, "closed connection|incomplete"),
]
LOADING = [
    *CLOSED,
    ({"kind": "status", "status": 400}, TrainerFailedError, "HTTP 400: injected fault"),
    ({"kind": "status", "status": 410}, TrainerStateLostError, "HTTP 410: injected fault"),
    ({"kind": "malformed"}, TrainerStateLostError, "can't be read"),
]
TRANSIENT: list[dict[str, Any]] = [
    {"kind": "drop"},
    {"kind": "malformed"},
    {"kind": "status", "status": 404},
    {"kind": "status", "status": 425},
]
"""Faults of a status poll that is then repeated."""


_lease_epochs = itertools.count(1)


def params(cases: list[tuple[dict[str, Any], type[TrainerError], str]]) -> list[Any]:
    return [pytest.param(*case, id=str(case[0].get("status", case[0]["kind"]))) for case in cases]


def a_place(emulator: RunningEmulator, folder: Path, **fields: Any) -> Place:
    """A run that trains an adapter, with its key in MY_KEY."""
    return Place(emulator, folder, **{"lora_rank": 4, "api_key_env": "MY_KEY"} | fields)


@pytest.fixture
def place(emulator: RunningEmulator, tmp_path: Path) -> Iterator[Place]:
    """A run without job and deployment."""
    place = a_place(emulator, tmp_path)
    yield place
    emulator.admin("DELETE", "faults")
    place.provisioning.clean_up()


@pytest.fixture(scope="module")
def ready(
    shared_emulator: RunningEmulator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    """A run with a running job and a ready deployment, shared by all tests."""
    place = a_place(shared_emulator, tmp_path_factory.mktemp("ready"))
    place.make_ready()
    yield place
    shared_emulator.admin("DELETE", "faults")
    place.provisioning.clean_up()


@pytest.fixture
async def trainer(emulator: RunningEmulator, ready: Place) -> AsyncIterator[DedicatedTrainer]:
    """A session on the ready job."""
    session = await ready.open(next(_lease_epochs))
    yield session
    emulator.admin("DELETE", "faults")
    await session.close()


@pytest.mark.parametrize("operation", ["accounts", "rlorTrainerJobs", "deployments"])
@pytest.mark.parametrize(("fault", "expected", "text"), params(OPENING))
def test_errors_while_creating_a_job_and_a_deployment(
    emulator: RunningEmulator,
    place: Place,
    operation: str,
    fault: dict[str, Any],
    expected: type[TrainerError],
    text: str,
) -> None:
    emulator.plan_fault(operation, **fault)
    with pytest.raises(expected, match=text) as caught:
        place.make_ready()
    assert type(caught.value) is expected
    assert emulator.admin("GET", "faults") == {"faults": []}
    place.make_ready()  # the failure has left nothing behind


@pytest.mark.parametrize(
    ("fault", "expected", "text"), params([case for case in OPENING if 425 not in case[0].values()])
)
def test_errors_while_polling_a_deployment(
    emulator: RunningEmulator,
    ready: Place,
    fault: dict[str, Any],
    expected: type[TrainerError],
    text: str,
) -> None:
    emulator.plan_fault("hot_load_status", **fault)
    with pytest.raises(expected, match=text) as caught:
        ready.provisioning.advance()
    assert type(caught.value) is expected
    ready.make_ready()


@pytest.mark.parametrize("status", [404, 425])
def test_a_deployment_that_is_not_ready_for_a_poll_is_starting(
    emulator: RunningEmulator, ready: Place, status: int
) -> None:
    emulator.plan_fault("hot_load_status", "status", status=status, message="warming up", count=3)
    readiness = ready.provisioning.advance()
    assert readiness.stage == "starting"
    assert re.search(rf"^deployment \S+: HTTP {status}: .*warming up", readiness.text)
    ready.make_ready()


@pytest.mark.parametrize(("fault", "expected", "text"), params(LOADING))
async def test_errors_while_loading_a_snapshot(
    emulator: RunningEmulator,
    trainer: DedicatedTrainer,
    fault: dict[str, Any],
    expected: type[TrainerError],
    text: str,
) -> None:
    emulator.plan_fault("hot_load", **fault)
    with pytest.raises(expected, match=text) as caught:
        await trainer.publish("policy-0000-e1")
    assert type(caught.value) is expected


@pytest.mark.parametrize(
    ("fault", "expected", "text"), params([case for case in LOADING if case[0] not in TRANSIENT])
)
async def test_errors_while_waiting_for_a_snapshot(
    emulator: RunningEmulator,
    trainer: DedicatedTrainer,
    fault: dict[str, Any],
    expected: type[TrainerError],
    text: str,
) -> None:
    emulator.plan_fault("hot_load_status", **fault)
    with pytest.raises(expected, match=text) as caught:
        await trainer.publish("policy-0000-e1")
    assert type(caught.value) is expected


@pytest.mark.parametrize(("fault", "expected", "text"), params(CLOSED))
async def test_errors_while_probing_a_snapshot(
    emulator: RunningEmulator,
    trainer: DedicatedTrainer,
    fault: dict[str, Any],
    expected: type[TrainerError],
    text: str,
) -> None:
    await trainer.publish("policy-0000-e1")
    emulator.plan_fault("hot_load_status", **fault)
    with pytest.raises(expected, match=text):
        await trainer.probe()


@pytest.mark.parametrize("fault", TRANSIENT, ids=["drop", "malformed", "404", "425"])
async def test_a_poll_without_an_answer_is_repeated(
    emulator: RunningEmulator,
    trainer: DedicatedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    fault: dict[str, Any],
) -> None:
    monkeypatch.setattr(hotload_module, "RETRY_INTERVAL", 0.05)
    emulator.plan_fault("hot_load_status", **fault, count=2)
    await trainer.publish("policy-0000-e1")
    assert emulator.admin("GET", "faults") == {"faults": []}
    emulator.plan_fault("hot_load_status", **fault)
    await trainer.probe()
    assert emulator.admin("GET", "faults") == {"faults": []}
    await trainer.probe()


async def test_a_deployment_that_is_down_does_not_end_the_session(
    emulator: RunningEmulator, trainer: DedicatedTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second poll starts while the SDK repeats the first. Later polls detect a mismatch."""
    monkeypatch.setattr(dedicated, "POLL_TIMEOUT", 0.1)
    first = await trainer.publish("policy-0000-e1")
    await trainer.publish("policy-0001-e1")
    emulator.plan_fault("hot_load_status", "status", status=503, count=6)
    for _ in range(6):
        await trainer.probe()
    assert emulator.admin("GET", "faults")["faults"]
    emulator.admin("DELETE", "faults")
    trainer._hotloader.load(first.path, None, 30.0, lambda: False)  # as an earlier holder may

    async def is_detected() -> bool:
        try:
            await trainer.probe()
        except TrainerStateLostError as error:
            return "serves policy-0000-e1" in str(error)
        return False

    await until(is_detected)


@pytest.mark.parametrize("status", [404, 425])
async def test_a_request_to_a_deployment_that_is_not_ready_is_repeated(
    emulator: RunningEmulator,
    trainer: DedicatedTrainer,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
) -> None:
    monkeypatch.setattr(hotload_module, "RETRY_INTERVAL", 0.05)
    emulator.plan_fault("hot_load", "status", status=status, count=2)
    await trainer.publish("policy-0000-e1")
    assert emulator.admin("GET", "faults") == {"faults": []}
    await trainer.probe()


@pytest.mark.parametrize(
    ("operation", "fault", "text"),
    [
        (
            "hot_load",
            {"kind": "status", "status": 425, "message": "still starting"},
            r"HTTP 425: .*still starting",
        ),
        ("hot_load_status", {"kind": "malformed"}, "can't be read"),
        ("hot_load_status", {"kind": "status", "status": 404, "message": "gone"}, "HTTP 404: .*"),
    ],
)
async def test_a_deployment_that_never_becomes_ready_reports_the_servers_message(
    emulator: RunningEmulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    fault: dict[str, Any],
    text: str,
) -> None:
    monkeypatch.setattr(hotload_module, "RETRY_INTERVAL", 0.05)
    place = a_place(emulator, tmp_path, deployment={"hotload_timeout": 0.2})
    place.make_ready()
    trainer = await place.open(1)
    emulator.plan_fault(operation, **fault, count=1000)
    with pytest.raises(TrainerStateLostError, match=text):
        await trainer.publish("policy-0000-e1")
    emulator.admin("DELETE", "faults")
    await trainer.close()
    place.provisioning.clean_up()


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_publication_ends_when_each_replica_serves_it(
    emulator: RunningEmulator, tmp_path: Path, replicas: int
) -> None:
    """Replicas that aren't ready, or serve the old snapshot, are waited for."""
    place = a_place(emulator, tmp_path, deployment={"replicas": replicas})
    place.make_ready()
    trainer = await place.open(1)
    await trainer.publish("policy-0000-e1")
    emulator.admin("POST", "hotload", {"seconds": 0.4})
    try:
        second = await trainer.publish("policy-0001-e1")
        assert serving(emulator) == [second.path] * replicas
        await trainer.probe()
    finally:
        emulator.admin("POST", "hotload", {})
        await trainer.close()
        place.provisioning.clean_up()


async def test_a_publication_that_a_replica_does_not_serve_in_time_ends_the_lease(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    place = a_place(emulator, tmp_path, deployment={"replicas": 2, "hotload_timeout": 0.3})
    place.make_ready()
    trainer = await place.open(1)
    await trainer.publish("policy-0000-e1")
    emulator.admin("POST", "hotload", {"seconds": 30.0})
    try:
        with pytest.raises(TrainerStateLostError, match=r"doesn't serve policy-0001-e1\S+ after"):
            await trainer.publish("policy-0001-e1")
    finally:
        emulator.admin("POST", "hotload", {})
        await trainer.close()
        place.provisioning.clean_up()


def serving(emulator: RunningEmulator) -> list[str]:
    """The snapshot of each replica of the newest deployment."""
    *_, newest = emulator.admin("GET", "state")["deployments"].values()
    return [replica["current_snapshot_identity"] for replica in newest["replicas"]]


def test_a_paused_job_is_restarted(emulator: RunningEmulator, place: Place) -> None:
    place.make_ready()
    record = find_provisioning(place.store)
    assert record is not None
    emulator.admin(
        "POST", f"jobs/{record.job_id}", {"state": "JOB_STATE_PAUSED", "message": "by an operator"}
    )
    readiness = place.provisioning.advance()
    assert (readiness.stage, readiness.resumed) == ("starting", True)
    assert "paused (by an operator)" in readiness.text
    place.make_ready()


def test_a_missing_key_is_reported_with_its_variable(
    emulator: RunningEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    place = a_place(
        emulator,
        tmp_path,
        backend="dedicated",
        tokenizer_model="some/tokenizer",
        deployment={"deployment_id": "mine"},
    )
    with pytest.raises(KeyRefusedError, match="the environment variable MY_KEY is empty"):
        place.provisioning.advance()
