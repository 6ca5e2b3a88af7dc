"""Routes for tests: plan faults, look inside. They exist only with --enable-faults."""

import dataclasses

from fastapi import APIRouter, Request, Response

from everburn.emulator import operations, wire
from everburn.emulator.checkpoints import digest
from everburn.emulator.faults import Fault, FaultPlan
from everburn.emulator.service import Emulator


def admin_routes(emulator: Emulator, plan: FaultPlan) -> APIRouter:
    router = APIRouter(prefix="/emulator")

    @router.post("/faults")
    async def add_fault(request: Request) -> Response:
        """Plan a fault: the fields of `faults.Fault`."""
        plan.add(Fault.parse(await wire.read(request)))
        return wire.reply({})

    @router.get("/faults")
    async def pending_faults() -> Response:
        return wire.reply({"faults": [dataclasses.asdict(fault) for fault in plan.pending()]})

    @router.delete("/faults")
    async def clear_faults() -> Response:
        plan.clear()
        return wire.reply({})

    @router.get("/state")
    async def state() -> Response:
        """Live sessions with their models, counts of operations by name, and snapshots."""
        return wire.reply(
            {
                "completions": emulator.completions,
                "sessions": {
                    session.session_id: {
                        "models": {
                            model.model_id: {
                                "base_model": model.spec.base_model,
                                "optimizer_steps": model.engine.optimizer_steps,
                                "applied": dict(model.applied),
                                "failed": dict(model.failed),
                            }
                            for model in session.models.values()
                        },
                        "snapshots": [str(ref) for ref in session.snapshots],
                    }
                    for session in emulator.sessions
                },
            }
        )

    @router.get("/digest/{model_id}")
    async def weights_digest(model_id: str) -> Response:
        """sha256 of a model's current weights, as in a checkpoint's meta.json."""
        engine = emulator.sessions.model(model_id).engine
        work = operations.at_once(lambda: digest(engine.weights()))
        return wire.reply({"weights_sha256": await emulator.compute(work)})

    @router.post("/expire/{session_id}")
    async def expire(session_id: str) -> Response:
        emulator.expire(session_id)
        return wire.reply({})

    @router.post("/wipe_gradients/{model_id}")
    async def wipe_gradients(model_id: str) -> Response:
        engine = emulator.sessions.model(model_id).engine
        await emulator.compute(operations.at_once(engine.wipe_gradients))
        return wire.reply({})

    return router
