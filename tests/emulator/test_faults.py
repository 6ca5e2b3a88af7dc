"""Each fault, and the reaction of the unmodified SDK."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fireworks.training.sdk import (
    APIStatusError,
    FiretitanServiceClient,
    RequestFailedError,
    types,
)
from fireworks.training.sdk._core.lib.retryable_exception import RetryableException

from everburn.emulator.http.server import EmulatorSettings, create_app
from everburn.emulator.models.base_model import TINY
from support.emulator import RunningEmulator, supervised

from .test_completions import complete, model_of, sample, sampler, snapshot

pytestmark = pytest.mark.usefixtures("quick_retries")

ADAM = types.AdamParams(learning_rate=1e-2)
DATUM = supervised([1, 2, 3, 4])


def applied(emulator: RunningEmulator, trainer: Any) -> dict[str, int]:
    return dict(emulator.model_state(trainer.model_id)["applied"])


@pytest.mark.parametrize("effect", [True, False])
def test_a_dropped_connection_is_retried_and_applied_once(
    emulator: RunningEmulator, trainer: Any, effect: bool
) -> None:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    emulator.plan_fault("optim_step", "drop", applied=effect)
    metrics = trainer.optim_step(ADAM).result().metrics
    assert metrics["step"] == 1
    assert applied(emulator, trainer) == {"forward_backward": 1, "optim_step": 1}
    assert emulator.admin("GET", "faults") == {"faults": []}


@pytest.mark.parametrize("status", [409, 429, 503])
def test_a_submission_is_retried_after(
    emulator: RunningEmulator, trainer: Any, status: int
) -> None:
    emulator.plan_fault("forward_backward", "status", status=status, applied=True)
    trainer.forward_backward([DATUM], "cross_entropy").result()
    assert applied(emulator, trainer) == {"forward_backward": 1}


def test_a_submission_is_not_retried_after_410(emulator: RunningEmulator, trainer: Any) -> None:
    emulator.plan_fault("forward", "status", status=410)
    with pytest.raises(APIStatusError, match="injected fault") as caught:
        trainer.forward([DATUM], "cross_entropy").result()
    assert caught.value.status_code == 410


@pytest.mark.parametrize("status", [408, 429, 503])
def test_polling_continues_after(emulator: RunningEmulator, trainer: Any, status: int) -> None:
    emulator.plan_fault("retrieve_future", "status", status=status)
    assert trainer.forward([DATUM], "cross_entropy").result().metrics["total_tokens:sum"] == 3


def test_polling_ends_with_a_retryable_exception_after_410(
    emulator: RunningEmulator, trainer: Any
) -> None:
    emulator.plan_fault("retrieve_future", "status", status=410)
    with pytest.raises(RetryableException):
        trainer.forward([DATUM], "cross_entropy").result()
    assert applied(emulator, trainer) == {"forward": 1}


def test_polling_ends_with_a_value_error_after_409(emulator: RunningEmulator, trainer: Any) -> None:
    emulator.plan_fault("retrieve_future", "status", status=409)
    with pytest.raises(ValueError, match="injected fault"):
        trainer.forward([DATUM], "cross_entropy").result()


def test_a_delayed_request_waits(emulator: RunningEmulator, trainer: Any) -> None:
    emulator.plan_fault("forward", "delay", seconds=0.3)
    began = time.monotonic()
    trainer.forward([DATUM], "cross_entropy").result()
    assert time.monotonic() - began >= 0.3


def test_lost_gradients_show_in_the_step(emulator: RunningEmulator, trainer: Any) -> None:
    trainer.forward_backward([DATUM], "cross_entropy").result()
    emulator.plan_fault("forward_backward", "wipe_gradients")
    trainer.forward_backward([DATUM], "cross_entropy").result()
    assert trainer.optim_step(ADAM).result().metrics["num_sequences"] == 1
    trainer.forward_backward([DATUM], "cross_entropy").result()
    emulator.admin("POST", f"wipe_gradients/{trainer.model_id}")
    with pytest.raises(RequestFailedError, match="without a forward_backward"):
        trainer.optim_step(ADAM).result()


def test_a_session_can_expire_before_a_step(emulator: RunningEmulator) -> None:
    service = emulator.connect()
    trainer = service.create_lora_training_client(base_model=TINY, rank=2)
    trainer.forward_backward([DATUM], "cross_entropy").result()
    emulator.plan_fault("optim_step", "expire_session")
    with pytest.raises(APIStatusError, match="has expired") as caught:
        trainer.optim_step(ADAM).result()
    assert caught.value.status_code == 410
    service.close()


def test_a_fault_for_an_unknown_session_answers_not_found(emulator: RunningEmulator) -> None:
    emulator.plan_fault("session_heartbeat", "expire_session")
    assert emulator.post("/api/v1/session_heartbeat", {"session_id": "ts-0"}).status_code == 404


def test_a_session_can_expire_before_its_result_is_fetched(emulator: RunningEmulator) -> None:
    service = emulator.connect()
    trainer = service.create_lora_training_client(base_model=TINY, rank=2)
    emulator.plan_fault("retrieve_future", "expire_session")
    with pytest.raises(RetryableException):
        trainer.forward_backward([DATUM], "cross_entropy").result()
    service.close()


def test_sampling_faults_reach_the_client(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any
) -> None:
    model = model_of(service, snapshot(trainer, "policy"))
    emulator.plan_fault("sample", "status", status=503)
    assert complete(emulator, model).status_code == 503
    emulator.plan_fault("sample", "drop")
    with pytest.raises(httpx.RemoteProtocolError):
        complete(emulator, model)
    assert complete(emulator, model).status_code == 200


def test_sampling_is_retried_by_the_sdk(
    emulator: RunningEmulator,
    service: FiretitanServiceClient,
    trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = sampler(service, snapshot(trainer, "policy"))
    monkeypatch.setattr(type(client.deployment_sampler), "_RETRY_BASE_BACKOFF_S", 0.01)
    for kind in ("drop", "status"):
        emulator.plan_fault("sample", kind, status=503)
    assert sample(client, seed=1).tokens == sample(client, seed=1).tokens


def test_faults_hit_only_the_planned_requests(emulator: RunningEmulator, trainer: Any) -> None:
    emulator.plan_fault("get_info", "status", status=404, after=1, count=2)
    body = {"model_id": trainer.model_id}
    statuses = [emulator.post("/api/v1/get_info", body).status_code for _ in range(5)]
    assert statuses == [200, 404, 404, 200, 200]


def test_admin_requests_about_an_operation_do_not_count_as_its_requests(
    emulator: RunningEmulator,
) -> None:
    before = emulator.arrivals("optim_step")
    emulator.plan_fault("optim_step", "status")
    assert emulator.arrivals("optim_step") == before
    assert len(emulator.admin("GET", "faults")["faults"]) == 1


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ({"operation": "forward", "kind": "explode"}, "kind must be one of"),
        ({"operation": "forward", "kind": "drop", "when": "now"}, "a fault has no when"),
        ({"kind": "drop"}, "operation must be"),
    ],
)
def test_invalid_faults_are_refused(
    emulator: RunningEmulator, fault: dict[str, str], complaint: str
) -> None:
    reply = httpx.post(f"{emulator.url}/emulator/faults", json=fault)
    assert reply.status_code == 400
    assert complaint in reply.text


@pytest.mark.parametrize(("permitted", "status"), [(True, 200), (False, 404)])
async def test_fault_routes_exist_only_if_enabled(
    tmp_path: Path, permitted: bool, status: int
) -> None:
    app = create_app(EmulatorSettings(home=tmp_path, enable_faults=permitted))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        assert (await client.get("http://emulator/emulator/state")).status_code == status
