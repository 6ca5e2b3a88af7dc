"""The HTTP application and its server.

/v1/...                              control plane (control_plane.py, managed_routes.py)
/training/v1/serverless/api/v1/...   training (training_routes.py)
/training/v1/serverless/inference/.. sampling (completions.py)
/training/v1/rlorTrainerJobs/...     training on a dedicated job (managed_routes.py)
/hot_load/...                        hotload (managed_routes.py)
/inference/...                       sampling from a deployment (completions.py)
/emulator/...                        tests only (admin.py), with --enable-faults
"""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.routing import Route

from everburn.emulator.errors import EmulatorError
from everburn.emulator.faults import FaultPlan, FaultyApp
from everburn.emulator.http import wire
from everburn.emulator.http.admin import admin_routes
from everburn.emulator.http.completions import CompletionsRoute
from everburn.emulator.http.control_plane import control_plane_routes
from everburn.emulator.http.managed_routes import managed_routes
from everburn.emulator.http.training_routes import training_routes
from everburn.emulator.service import Emulator, EmulatorSettings

SERVERLESS = "/training/v1/serverless"

UVICORN_OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "log_level": "warning",
    "access_log": False,
    # Longer than clients keep idle connections: closing one as a request arrives would look like a
    # network failure.
    "timeout_keep_alive": 120,
}


def create_app(settings: EmulatorSettings) -> FastAPI:
    emulator = Emulator(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        emulator.start()
        watch = asyncio.create_task(emulator.watch())
        yield
        watch.cancel()
        await emulator.stop()

    app = FastAPI(title="Everburn emulator", lifespan=lifespan)
    app.state.emulator = emulator
    app.add_exception_handler(EmulatorError, _on_error)
    app.include_router(training_routes(emulator), prefix=SERVERLESS)
    app.include_router(control_plane_routes(emulator))
    app.include_router(managed_routes(emulator))
    for prefix in (SERVERLESS, ""):
        completions = Route(
            f"{prefix}/inference/v1/completions", CompletionsRoute(emulator), methods=["POST"]
        )
        app.router.routes.insert(0, completions)  # the busiest route first: they are tried in order

    if settings.enable_faults:
        plan = FaultPlan()
        app.include_router(admin_routes(emulator, plan))
        app.add_middleware(FaultyApp, emulator=emulator, plan=plan)
    return app


def serve(settings: EmulatorSettings, port: int) -> None:
    """Serve on 127.0.0.1 until interrupted."""
    app = create_app(settings)
    # Garbage collection of all torch and transformers objects takes 0.1 s.
    gc.freeze()
    uvicorn.run(app, port=port, **UVICORN_OPTIONS)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EmulatorError)
    return wire.refuse(error)


__all__ = ["UVICORN_OPTIONS", "EmulatorSettings", "create_app", "serve"]
