"""Lifetimes of sessions, their models and snapshots, and checkpoints."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fireworks.training.sdk import (
    APIStatusError,
    FiretitanServiceClient,
    RequestFailedError,
    types,
)

from everburn.emulator.models.base_model import TINY
from everburn.emulator.sessions import Sessions
from support.emulator import RunningEmulator, running_emulator, supervised, wait_for

from .test_completions import complete, model_of, snapshot
from .test_training import digests, warm_up

DATUM = supervised([1, 2, 3, 4])


def refused(call: Any) -> APIStatusError:
    """The HTTP error that a training call ends with."""
    with pytest.raises(APIStatusError) as caught:
        call.result()
    return caught.value


def test_an_inactive_session_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_emulator(tmp_path, gap_timeout=2) as emulator:  # it checks every 0.5 s
        service = emulator.connect()
        trainer = service.create_lora_training_client(base_model=TINY, rank=2)
        path = snapshot(trainer, "policy")
        # Not earlier: making a model may take longer. The SDK's heartbeat comes every 10 s.
        settings = replace(emulator.emulator.settings, session_ttl=0.2)
        monkeypatch.setattr(emulator.emulator, "settings", settings)
        wait_for(lambda: emulator.admin("GET", "state")["sessions"] == {})

        error = refused(trainer.forward([DATUM], "cross_entropy"))
        assert error.status_code == 410
        assert f"session {service.training_session_id} has expired" in str(error)
        dead = complete(emulator, model_of(service, path))
        assert dead.status_code == 404
        assert "has expired" in dead.text
        service.close()


def test_activity_keeps_a_session_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "everburn.emulator.sessions.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    sessions = Sessions()
    silent, alive = sessions.create(), sessions.create()
    clock.now += 50
    sessions.touch(alive.session_id)
    clock.now += 20
    assert sessions.inactive(60) == [silent.session_id]
    assert sessions.inactive(80) == []


def test_a_heartbeat_counts_as_activity(emulator: RunningEmulator) -> None:
    session_id = emulator.post("/api/v1/create_session", {}).json()["session_id"]
    session = emulator.emulator.sessions.get(session_id)
    created = session.last_seen
    reply = emulator.post("/api/v1/session_heartbeat", {"session_id": session_id})
    assert reply.status_code == 200
    assert session.last_seen > created


def test_deleting_a_session_frees_everything(
    emulator: RunningEmulator, service: FiretitanServiceClient, trainer: Any
) -> None:
    other = emulator.connect()
    doomed = other.create_lora_training_client(base_model=TINY, rank=2)
    path = snapshot(doomed, "policy")
    other.delete_training_session()
    assert complete(emulator, model_of(other, path)).status_code == 404
    standalone = f"accounts/everburn/trainingSamplers/checkpoints/{path}"
    assert complete(emulator, standalone).status_code == 404
    with pytest.raises(RuntimeError, match="its session has ended"):
        emulator.connect().create_sampling_client(model_path=path)
    warm_up(trainer)  # another session continues
    other.close()


def test_a_client_is_unusable_after_a_refusal(emulator: RunningEmulator) -> None:
    service = emulator.connect()
    trainer = service.create_lora_training_client(base_model=TINY, rank=2)
    emulator.admin("POST", f"expire/{service.training_session_id}")
    assert refused(trainer.forward_backward([DATUM], "cross_entropy")).status_code == 410
    with pytest.raises(RuntimeError, match="unload this model and reconnect"):
        trainer.optim_step(types.AdamParams()).result()
    service.close()


def test_a_test_can_expire_inactive_sessions_at_once(tmp_path: Path) -> None:
    with running_emulator(tmp_path) as emulator:
        service = emulator.connect()
        emulator.admin("POST", "expire_silent", {"seconds": 3600})
        assert list(emulator.admin("GET", "state")["sessions"]) == [service.training_session_id]
        emulator.admin("POST", "expire_silent", {"seconds": 0})
        assert emulator.admin("GET", "state")["sessions"] == {}
        service.close()


def test_only_checkpoints_outlive_a_restart(tmp_path: Path) -> None:
    with running_emulator(tmp_path) as emulator:
        service = emulator.connect()
        trainer = service.create_lora_training_client(base_model=TINY, rank=2)
        warm_up(trainer)
        saved = trainer.save_state("kept").result().path
        policy = snapshot(trainer, "policy")
        expected = digests(emulator, saved)
        port = int(emulator.url.rpartition(":")[2])

    with running_emulator(tmp_path, port=port) as emulator:
        error = refused(trainer.forward([DATUM], "cross_entropy"))
        assert error.status_code == 404
        assert "the emulator restarted" in str(error)
        assert complete(emulator, model_of(service, policy)).status_code == 404
        service.close()

        fresh = emulator.connect()
        resumed = fresh.create_lora_training_client(base_model=TINY, rank=2)
        assert resumed.list_checkpoints() == [saved]
        resumed.load_state_with_optimizer(saved).result()
        assert digests(emulator, resumed.save_state("again").result().path) == expected
        with pytest.raises(RequestFailedError, match="no checkpoint"):
            resumed.load_state(policy).result()
        fresh.close()


def test_an_operation_that_never_arrives_breaks_the_sequence(tmp_path: Path) -> None:
    with running_emulator(tmp_path, gap_timeout=0.2) as emulator:
        service = emulator.connect()
        trainer = service.create_lora_training_client(base_model=TINY, rank=2)
        body = {"adam_params": {}, "model_id": trainer.model_id, "seq_id": 2}
        waiting = emulator.post("/api/v1/optim_step", body).json()["request_id"]
        reply = emulator.post("/api/v1/retrieve_future", {"request_id": waiting}).json()
        assert reply["error_class"] == "SequenceBroken"
        assert "seq_id 1 of run-" in reply["error"]
        late = emulator.post("/api/v1/optim_step", {**body, "seq_id": 3}).json()["request_id"]
        reply = emulator.post("/api/v1/retrieve_future", {"request_id": late}).json()
        assert reply["error_class"] == "SequenceBroken"
        service.close()


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("create_model", {"session_id": "ts-0"}, "unknown session ts-0"),
        ("session_heartbeat", {"session_id": "ts-0"}, "unknown session ts-0"),
        ("forward", {"model_id": "run-0:train:0", "seq_id": 1}, "unknown model run-0:train:0"),
        ("retrieve_future", {"request_id": "ts-0.1"}, "unknown session ts-0"),
        ("weights_info", {"tinker_path": "everburn/run-" + "0" * 32 + "/x"}, "no checkpoint"),
    ],
)
def test_unknown_addresses_are_not_found(
    emulator: RunningEmulator, path: str, body: dict[str, Any], complaint: str
) -> None:
    reply = emulator.post(f"/api/v1/{path}", body)
    assert reply.status_code == 404
    assert complaint in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model_id": 3}'])
def test_malformed_bodies_are_refused(emulator: RunningEmulator, body: bytes) -> None:
    reply = httpx.post(f"{emulator.base_url}/api/v1/optim_step", content=body)
    assert reply.status_code == 400


def test_the_server_is_healthy(emulator: RunningEmulator) -> None:
    assert httpx.get(f"{emulator.base_url}/api/v1/healthz").json() == {"status": "ok"}
