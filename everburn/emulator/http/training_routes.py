"""Routes of the training protocol (Tinker's JSON under /api/v1).

The serverless service and every dedicated trainer job (managed_routes.py) have the same routes,
under different prefixes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from everburn.emulator.compute import Work
from everburn.emulator.http import wire
from everburn.emulator.service import Emulator
from everburn.emulator.sessions import Model
from everburn.emulator.training import operations
from everburn.emulator.training.checkpoints import CheckpointRef
from everburn.emulator.training.futures import Promise, Result

LONG_POLL_SECONDS = 5.0
"""How long retrieve_future waits for a result before it answers try_again. The SDK's timeout is
45 s.
"""

LARGE_BODY_BYTES = 1 << 18
"""Bodies above this are parsed off the event loop."""

Start = Callable[[Model, Mapping[str, Any]], Work[Result]]
Handler = Callable[[Request], Awaitable[Response]]


def training_routes(emulator: Emulator) -> APIRouter:
    router = APIRouter(prefix="/api/v1")
    store, account = emulator.checkpoints, emulator.settings.account
    operations_by_name: dict[str, Start] = {
        "forward": operations.forward,
        "forward_backward": operations.forward_backward,
        "optim_step": operations.optim_step,
        "save_weights": lambda model, body: operations.save_weights(model, store, account, body),
        "load_weights": emulator.load_weights,
        "save_weights_for_sampler": emulator.publish,
        "load_adapter": lambda model, body: operations.load_adapter(model, emulator.models, body),
    }
    for name, start in operations_by_name.items():
        router.add_api_route(f"/{name}", _submit(emulator, name, start), methods=["POST"])
    router.add_api_route("/retrieve_future", _retrieve(emulator), methods=["POST"])

    @router.get("/healthz")
    async def healthz() -> Response:
        return wire.reply({"status": "ok"})

    @router.post("/create_session")
    async def create_session(request: Request) -> Response:
        session = emulator.sessions.create(request.path_params.get("job"))
        return wire.reply({"type": "create_session", "session_id": session.session_id})

    @router.post("/session_heartbeat")
    async def session_heartbeat(request: Request) -> Response:
        emulator.sessions.touch(wire.text(await wire.read(request), "session_id"))
        return wire.reply({"type": "session_heartbeat"})

    @router.post("/telemetry")
    async def telemetry() -> Response:
        return wire.reply({"status": "accepted"})

    @router.post("/create_model")
    async def create_model(request: Request) -> Response:
        body = await wire.read(request)
        session = emulator.sessions.touch(wire.text(body, "session_id"))
        return _accepted(emulator.create_model(session, body), None)

    @router.post("/unload_model")
    async def unload_model(request: Request) -> Response:
        model = emulator.sessions.model(wire.text(await wire.read(request), "model_id"))
        return _accepted(emulator.unload(model), None)

    @router.post("/get_info")
    async def get_info(request: Request) -> Response:
        model = emulator.sessions.model(wire.text(await wire.read(request), "model_id"))
        return wire.reply(
            {
                "type": "get_info",
                "model_id": model.model_id,
                "model_name": model.spec.base_model,
                "model_data": {
                    "arch": "qwen3",
                    "model_name": model.spec.base_model,
                    "tokenizer_id": str(model.engine.base.folder),
                },
                "is_lora": bool(model.spec.rank),
                "lora_rank": model.spec.rank,
                "seed": model.spec.seed,
            }
        )

    @router.post("/weights_info")
    async def weights_info(request: Request) -> Response:
        path = wire.text(await wire.read(request), "tinker_path")
        info = await asyncio.to_thread(store.info, CheckpointRef.parse(path, account=account))
        return wire.reply(
            {
                "base_model": info.spec.base_model,
                "is_lora": bool(info.spec.rank),
                "lora_rank": info.spec.rank or None,
                "train_unembed": info.spec.train_unembed,
                "train_mlp": info.spec.train_mlp,
                "train_attn": info.spec.train_attn,
                "weights_sha256": info.weights_sha256,
                "optimizer_sha256": info.optimizer_sha256,
                "step": info.step,
            }
        )

    @router.get("/list_checkpoints")
    async def list_checkpoints() -> Response:
        return wire.reply({"checkpoints": await asyncio.to_thread(store.list)})

    @router.post("/create_sampling_route")
    async def create_sampling_route(request: Request) -> Response:
        body = await wire.read(request)
        if "base_model" in body:
            await emulator.base(wire.text(body, "base_model"))
        else:
            emulator.sessions.require_run(wire.text(body, "training_run").rpartition("/")[2])
        return wire.reply({})

    return router


def _submit(emulator: Emulator, name: str, start: Start) -> Handler:
    async def submit(request: Request) -> Response:
        raw = await request.body()
        large = len(raw) > LARGE_BODY_BYTES
        body = await asyncio.to_thread(wire.decode, raw) if large else wire.decode(raw)
        model = emulator.sessions.model(wire.text(body, "model_id"))
        promise = emulator.submit(name, model, body, raw, partial(start, model, body))
        return _accepted(promise, model.model_id)

    return submit


def _retrieve(emulator: Emulator) -> Handler:
    async def retrieve(request: Request) -> Response:
        request_id = wire.text(await wire.read(request), "request_id")
        payload = await emulator.sessions.promise(request_id).wait(LONG_POLL_SECONDS)
        if payload is not None:
            return wire.reply(payload)
        emulator.sessions.promise(request_id)  # refuses if the session ended meanwhile
        return wire.reply({"type": "try_again", "request_id": request_id, "queue_state": "active"})

    return retrieve


def _accepted(promise: Promise, model_id: str | None) -> Response:
    return wire.reply({"request_id": promise.request_id, "model_id": model_id})
