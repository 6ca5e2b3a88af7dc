"""Routes of the managed surface: trainer jobs, deployments, hotload.

    /v1/accounts/<account>/rlorTrainerJobs[/<job>[:resume]]    jobs
    /v1/accounts/<account>/deployments[/<deployment>]          deployments
    /v1/accounts/<account>/trainingShapes/<shape>[/versions]   what a shape prescribes
    /training/v1/rlorTrainerJobs/<account>/<job>/api/v1/...    a job's trainer (training_routes.py)
    /hot_load/v1/models/hot_load                               load weights, and how far it is

Sampling at a deployment goes to /inference/v1/completions (completions.py). Owns the shape of
requests and answers; what they do: emulator/managed.py.
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
"""maxSupportedContextLength of every shape: what the built-in base models have."""


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
        await emulator.base(wire.text(config, "baseModel"))  # refuses unknown ones
        return wire.reply(managed.create_job(job_id, body).describe(account))

    @router.get(JOBS)
    async def list_jobs() -> Response:
        return wire.reply({"rlorTrainerJobs": [job.describe(account) for job in managed.jobs()]})

    @router.get(JOBS + "/{job}")
    async def get_job(job: str) -> Response:
        return wire.reply(managed.job(job).describe(account))

    @router.post(JOBS + "/{job}:resume")
    async def resume_job(job: str) -> Response:
        return wire.reply(managed.resume_job(job).describe(account))

    @router.delete(JOBS + "/{job}")
    async def delete_job(job: str) -> Response:
        managed.delete_job(job)
        return wire.reply({})

    @router.get(JOBS + "/{job}/checkpoints")
    async def job_checkpoints(job: str) -> Response:
        """Exports for samplers; a difference can't stand alone as a model."""
        rows = [_export(account, job, export) for export in managed.exports(job).values()]
        return wire.reply({"checkpoints": rows})

    @router.post("/v1/accounts/{owner}/checkpoints/{checkpoint}")
    async def promote(owner: str, checkpoint: str, request: Request) -> Response:
        """`<checkpoint>:promote`: an export of the job that the body names becomes a model."""
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
                f"{identity} is a difference to {export.delta_from}: export it whole"
            )
        promoted = await emulator.promote(export.snapshot, body)
        return wire.reply({"model": promoted.described()})

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
        return wire.reply(deployment.describe(account, managed.state_of(deployment)))

    @router.get(DEPLOYMENTS)
    async def list_deployments() -> Response:
        found = [each.describe(account, managed.state_of(each)) for each in managed.deployments()]
        return wire.reply({"deployments": found})

    @router.get(DEPLOYMENTS + "/{deployment}")
    async def get_deployment(deployment: str) -> Response:
        found = managed.deployment(deployment)
        return wire.reply(found.describe(account, managed.state_of(found)))

    @router.patch(DEPLOYMENTS + "/{deployment}")
    async def change_deployment(deployment: str, request: Request) -> Response:
        changed = managed.change_deployment(deployment, await wire.read(request))
        return wire.reply(changed.describe(account, managed.state_of(changed)))

    @router.delete(DEPLOYMENTS + "/{deployment}")
    async def delete_deployment(deployment: str) -> Response:
        managed.delete_deployment(deployment)
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
    """Every name is a shape here: there is no hardware to choose."""
    return {
        "name": f"accounts/{owner}/trainingShapes/{shape}/versions/{version}",
        "snapshot": {
            "maxSupportedContextLength": POSITIONS,
            "deploymentShapeVersion": f"accounts/{owner}/deploymentShapes/{shape}/versions/1",
            "trainerMode": "POLICY_TRAINER",
        },
    }
