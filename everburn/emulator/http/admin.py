"""Routes for tests: fault injection and introspection. They exist only with --enable-faults."""

import dataclasses
from typing import cast, get_args

from fastapi import APIRouter, Request, Response

from everburn.emulator.errors import InvalidInput
from everburn.emulator.faults import ADMIN, Fault, FaultPlan
from everburn.emulator.http import wire
from everburn.emulator.managed import JobState
from everburn.emulator.service import Emulator
from everburn.emulator.training import operations
from everburn.emulator.training.checkpoints import digest
from everburn.emulator.unknowns import Unknowns


def admin_routes(emulator: Emulator, plan: FaultPlan) -> APIRouter:
    router = APIRouter(prefix=ADMIN)

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

    @router.get("/arrivals/{operation}")
    async def arrivals(operation: str) -> Response:
        """{"seconds": [...]}: arrival times of the last requests of an operation."""
        return wire.reply({"seconds": plan.arrivals(operation)})

    @router.get("/state")
    async def state() -> Response:
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
                        "job": session.job,
                    }
                    for session in emulator.sessions
                },
                "jobs": {job.job_id: job.state for job in emulator.managed.jobs()},
                "deployments": {
                    deployment.deployment_id: deployment.status()
                    for deployment in emulator.managed.deployments()
                },
                "unknowns": dataclasses.asdict(emulator.unknowns),
            }
        )

    @router.get("/digest/{model_id}")
    async def weights_digest(model_id: str) -> Response:
        """sha256 of a model's current weights, as in a checkpoint's meta.json."""
        engine = emulator.sessions.model(model_id).engine
        work = operations.single_slice(lambda: digest(engine.weights()))
        return wire.reply({"weights_sha256": await emulator.compute(work)})

    @router.post("/unknowns")
    async def unknowns(request: Request) -> Response:
        """Set the switches of `unknowns.Unknowns`."""
        emulator.unknowns = Unknowns(**await wire.read(request))
        return wire.reply({})

    @router.post("/capacity")
    async def capacity(request: Request) -> Response:
        """{"available": bool, "boot_seconds": s}: capacity for jobs; start time of jobs and
        deployments."""
        body = await wire.read(request)
        emulator.managed.capacity = wire.flag(body, "available", True)
        emulator.managed.boot_seconds = wire.number(body, "boot_seconds", 0.0)
        return wire.reply({})

    @router.post("/hotload")
    async def hotload(request: Request) -> Response:
        """{"seconds": s}: load time per replica; replicas load one after the other."""
        emulator.managed.hotload_seconds = wire.number(await wire.read(request), "seconds", 0.0)
        return wire.reply({})

    @router.post("/jobs/{job_id}")
    async def interrupt_job(job_id: str, request: Request) -> Response:
        """{"state": ..., "message": ...}: end the job's process and put the job into a state."""
        body = await wire.read(request)
        state = wire.text(body, "state")
        if state not in get_args(JobState):
            raise InvalidInput(f"state must be one of {', '.join(get_args(JobState))}")
        emulator.managed.interrupt_job(job_id, cast(JobState, state), body.get("message", ""))
        return wire.reply({})

    @router.post("/expire/{session_id}")
    async def expire(session_id: str) -> Response:
        emulator.expire(session_id)
        return wire.reply({})

    @router.post("/expire_silent")
    async def expire_silent(request: Request) -> Response:
        """{"seconds": s}: end the sessions that have been inactive for so long."""
        emulator.expire_silent(wire.number(await wire.read(request), "seconds", 0.0))
        return wire.reply({})

    @router.post("/wipe_gradients/{model_id}")
    async def wipe_gradients(model_id: str) -> Response:
        engine = emulator.sessions.model(model_id).engine
        await emulator.compute(operations.single_slice(engine.clear_gradients))
        return wire.reply({})

    return router
