"""Routes of the control plane under /v1: accounts, models, training sessions and promotion.

Owns their JSON. Doesn't own sessions (emulator/sessions.py) or promoted models
(emulator/models/registry.py).
"""

from typing import Any

from fastapi import APIRouter, Request, Response

from everburn.emulator.errors import NotFound
from everburn.emulator.http import wire
from everburn.emulator.models import base_model
from everburn.emulator.service import Emulator
from everburn.emulator.sessions import Session, Snapshot


def control_plane_routes(emulator: Emulator) -> APIRouter:
    router = APIRouter(prefix="/v1")
    account = emulator.settings.account
    sessions = "/accounts/{account_id}/trainingSessions/{session_id}"

    @router.get("/accounts")
    async def accounts() -> Response:
        return wire.reply({"accounts": [{"name": f"accounts/{account}"}]})

    @router.get("/accounts/{owner}/models/{model_id}")
    async def model(owner: str, model_id: str) -> Response:
        name = f"accounts/{owner}/models/{model_id}"
        if name in base_model.NAMES:
            return wire.reply(
                {
                    "name": name,
                    "state": "READY",
                    "kind": "HF_BASE_MODEL",
                    "baseModelDetails": {"moe": False},
                }
            )
        if owner != account:
            raise NotFound(f"there is no model {name}")
        return wire.reply(emulator.models.get(name).as_json())

    @router.get(f"{sessions}/checkpoints")
    async def checkpoints(account_id: str, session_id: str) -> Response:
        """Sampler snapshots, oldest first; each can be promoted."""
        session = _session(emulator, account_id, session_id)
        rows = [_row(account, session, snapshot) for snapshot in session.snapshots.values()]
        return wire.reply({"trainingSessionCheckpoints": rows})

    @router.post(f"{sessions}/checkpoints/{{checkpoint}}")
    async def promote(
        account_id: str, session_id: str, checkpoint: str, request: Request
    ) -> Response:
        """`<checkpoint>:promote`: make a model of a snapshot."""
        name, _, action = checkpoint.partition(":")
        if action != "promote":
            raise NotFound(f"unknown action {action!r} of a checkpoint")
        session = _session(emulator, account_id, session_id)
        snapshot = next((s for ref, s in session.snapshots.items() if ref.name == name), None)
        if snapshot is None:
            raise NotFound(f"session {session_id} has no sampler snapshot {name}")
        promoted = await emulator.promote(snapshot, await wire.read(request))
        return wire.reply({"model": promoted.as_json()})

    @router.delete(sessions)
    async def delete_training_session(account_id: str, session_id: str) -> Response:
        emulator.expire(session_id)
        return wire.reply({})

    return router


def _session(emulator: Emulator, account_id: str, session_id: str) -> Session:
    if account_id != emulator.settings.account:
        raise NotFound(f"unknown account {account_id}")
    return emulator.sessions.get(session_id)


def _row(account: str, session: Session, snapshot: Snapshot) -> dict[str, Any]:
    parent = f"accounts/{account}/trainingSessions/{session.session_id}"
    kind = "LORA" if snapshot.spec.rank else "BASE"
    return {
        "name": f"{parent}/checkpoints/{snapshot.ref.name}",
        "checkpointType": f"CHECKPOINT_TYPE_INFERENCE_{kind}",
        "createTime": snapshot.created,
        "promotable": True,
    }
