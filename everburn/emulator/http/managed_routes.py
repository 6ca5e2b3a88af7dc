"""Routes of the managed surface: trainer jobs, deployments, hotload.

    /v1/accounts/<account>/rlorTrainerJobs[/<job>[:resume]]    jobs
    /v1/accounts/<account>/deployments[/<deployment>]          deployments
    /v1/accounts/<account>/trainingShapes/<shape>[/versions]   what a shape prescribes
    /training/v1/rlorTrainerJobs/<account>/<job>/api/v1/...    a job's trainer (training_routes.py)
    /hot_load/v1/models/hot_load                               load weights; status of the load

Sampling from a deployment goes to /inference/v1/completions (completions.py). Owns the shape of
requests and responses. Doesn't own the state behind them (emulator/managed.py).
"""

from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from everburn.emulator.errors import InvalidInput, NotFound
from everburn.emulator.http import wire
from everburn.emulator.http.training_routes import training_routes
from everburn.emulator.managed import Export
from everburn.emulator.service import Emulator

TRAINER = "/training/v1/rlorTrainerJobs/{account}/{job}"
JOBS = "/v1/accounts/{account}/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/{account}/deployments"
SHAPES = "/v1/accounts/{owner}/trainingShapes/{shape}"
POSITIONS = 256
"""maxSupportedContextLength of every shape: that of the built-in base models."""


def managed_routes(emulator: Emulator) -> APIRouter:
    router = APIRouter()
    managed, account = emulator.managed, emulator.settings.account

    @router.post(JOBS)
    async def create_job(request: Request) -> Response:
        job_id = _query(request, "rlorTrainerJobId")
        body = await wire.read(request)
        config = body.get("trainingConfig")
        if not isinstance(config, dict):
            raise InvalidInput("trainingConfig must be an object")
        await emulator.base(wire.text(config, "baseModel"))  # refuses unknown base models
        return wire.reply(managed.create_job(job_id, body).as_json(account))

    @router.get(JOBS)
    async def list_jobs() -> Response:
        return wire.reply({"rlorTrainerJobs": [job.as_json(account) for job in managed.jobs()]})

    @router.get(JOBS + "/{job}")
    async def get_job(job: str) -> Response:
        return wire.reply(managed.job(job).as_json(account))

    @router.post(JOBS + "/{job}:resume")
    async def resume_job(job: str) -> Response:
        return wire.reply(managed.resume_job(job).as_json(account))

    @router.delete(JOBS + "/{job}")
    async def delete_job(job: str) -> Response:
        managed.delete_job(job)
        return wire.reply({})

    @router.get(JOBS + "/{job}/checkpoints")
    async def job_checkpoints(job: str) -> Response:
        """Sampler exports; a delta can't be promoted."""
        rows = [_export(account, job, export) for export in managed.exports(job).values()]
        return wire.reply({"checkpoints": rows})

    @router.post("/v1/accounts/{owner}/checkpoints/{checkpoint}")
    async def promote(owner: str, checkpoint: str, request: Request) -> Response:
        """`<checkpoint>:promote`: make a model of an export of the job that the body names."""
        identity, _, action = checkpoint.partition(":")
        if action != "promote":
            raise NotFound(f"unknown action {action!r} of a checkpoint")
        body = await wire.read(request)
        job = wire.text(body, "trainer_job_id").rpartition("/")[2]
        export = managed.exports(job).get(identity)
        if export is None:
            raise NotFound(f"trainer job {job} has no export {identity}")
        if export.kind == "delta":
            raise InvalidInput(
                f"{identity} is a delta to {export.delta_from}: export the whole model"
            )
        promoted = await emulator.promote(export.snapshot, body)
        return wire.reply({"model": promoted.as_json()})

    @router.get(SHAPES + "/versions")
    async def shape_versions(owner: str, shape: str) -> Response:
        return wire.reply({"trainingShapeVersions": [_shape(owner, shape, "1")]})

    @router.get(SHAPES + "/versions/{version}")
    async def shape_version(owner: str, shape: str, version: str) -> Response:
        return wire.reply(_shape(owner, shape, version))

    @router.post(DEPLOYMENTS)
    async def create_deployment(request: Request) -> Response:
        deployment_id = _query(request, "deploymentId")
        body = await wire.read(request)
        await emulator.base(wire.text(body, "baseModel"))
        deployment = managed.create_deployment(deployment_id, body)
        return wire.reply(deployment.as_json(account, managed.state_of(deployment)))

    @router.get(DEPLOYMENTS)
    async def list_deployments() -> Response:
        rows = [d.as_json(account, managed.state_of(d)) for d in managed.deployments()]
        return wire.reply({"deployments": rows})

    @router.get(DEPLOYMENTS + "/{deployment_id}")
    async def get_deployment(deployment_id: str) -> Response:
        deployment = managed.deployment(deployment_id)
        return wire.reply(deployment.as_json(account, managed.state_of(deployment)))

    @router.patch(DEPLOYMENTS + "/{deployment_id}")
    async def change_deployment(deployment_id: str, request: Request) -> Response:
        deployment = managed.change_deployment(deployment_id, await wire.read(request))
        return wire.reply(deployment.as_json(account, managed.state_of(deployment)))

    @router.delete(DEPLOYMENTS + "/{deployment_id}")
    async def delete_deployment(deployment_id: str) -> Response:
        managed.delete_deployment(deployment_id)
        return wire.reply({})

    @router.post("/hot_load/v1/models/hot_load")
    async def hotload(request: Request) -> Response:
        body = await wire.read(request)
        wire.text(body, "identity")
        managed.hotload(_deployment(request), request.headers.get("fireworks-model", ""), body)
        return wire.reply({})

    @router.get("/hot_load/v1/models/hot_load")
    async def hotload_status(request: Request) -> Response:
        return wire.reply(managed.deployment(_deployment(request)).status())

    async def require_running(job: str) -> None:
        managed.running_job(job)

    trainer = APIRouter(prefix=TRAINER, dependencies=[Depends(require_running)])
    trainer.include_router(training_routes(emulator))

    @trainer.get("/v1/accounts")
    async def accounts() -> Response:
        return wire.reply({"accounts": [{"name": f"accounts/{account}"}]})

    router.include_router(trainer)
    return router


def _export(account: str, job: str, export: Export) -> dict[str, Any]:
    kind = "LORA" if export.snapshot.spec.rank else "BASE"
    return {
        "name": f"accounts/{account}/rlorTrainerJobs/{job}/checkpoints/{export.identity}",
        "checkpointType": f"CHECKPOINT_TYPE_INFERENCE_{kind}",
        "createTime": export.snapshot.created,
        "promotable": export.kind != "delta",
    }


def _query(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if not value:
        raise InvalidInput(f"the query must name {name}")
    return value


def _deployment(request: Request) -> str:
    return request.headers.get("fireworks-deployment", "").rpartition("/")[2]


def _shape(owner: str, shape: str, version: str) -> dict[str, Any]:
    """A shape of any name: there is no hardware to choose."""
    return {
        "name": f"accounts/{owner}/trainingShapes/{shape}/versions/{version}",
        "snapshot": {
            "maxSupportedContextLength": POSITIONS,
            "deploymentShapeVersion": f"accounts/{owner}/deploymentShapes/{shape}/versions/1",
            "trainerMode": "POLICY_TRAINER",
        },
    }
