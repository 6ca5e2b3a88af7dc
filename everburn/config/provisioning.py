"""The fields of `trainer` and `deployment`: the provisioning that a configuration requests.

Doesn't own what a run has (records/provisioning.py).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_INACTIVITY = 3 * 3600.0
"""Seconds; the service refuses more."""


PENDING_TIMEOUT = 48 * 3600.0


MAX_HOTLOAD = 3600.0
"""Seconds; an operation of two hours counts as one that never ends."""


_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


class _Provisioning(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _check_id(value: str) -> str:
    if not _ID.fullmatch(value):
        raise ValueError(
            f"{value!r} isn't an id: at most 63 lower-case letters, digits and hyphens, beginning "
            "with a letter (not a full resource name)"
        )
    return value


_Id = Annotated[str, AfterValidator(_check_id)]


def _shape_check(what: str, folder: str) -> AfterValidator:
    form = re.compile(rf"accounts/[^/]+/{folder}/[^/]+(/versions/[^/]+)?")

    def check(value: str) -> str:
        if not form.fullmatch(value):
            raise ValueError(
                f"{value!r} isn't a {what}: write "
                f"accounts/<account>/{folder}/<shape>[/versions/<version>]"
            )
        return value

    return AfterValidator(check)


_TrainingShape = Annotated[str, _shape_check("training shape", "trainingShapes")]
_DeploymentShape = Annotated[str, _shape_check("deployment shape", "deploymentShapes")]


class TrainerProvisioning(_Provisioning):
    """The trainer job. Without `job_id` the run creates its own."""

    training_shape: _TrainingShape | None = Field(
        default=None,
        description="accounts/<account>/trainingShapes/<shape>, its latest validated version "
        "unless one is named; by default Fireworks selects.",
    )
    job_id: _Id | None = Field(default=None, description="An existing job to attach to.")
    region: str | None = Field(default=None, min_length=1)
    replicas: int | None = Field(default=None, ge=1, description="Data-parallel replicas.")
    max_context_length: int | None = Field(default=None, ge=1)
    use_reservation: bool = True
    reservation_target: str | None = Field(default=None, min_length=1)
    inactivity_timeout: float = Field(
        default=3600.0,
        ge=60,
        le=MAX_INACTIVITY,
        description="Seconds without a session after which the service stops the job.",
    )
    pending_timeout: float = Field(
        default=PENDING_TIMEOUT, gt=0, description="Seconds to wait for capacity."
    )
    ready_timeout: float = Field(
        default=3600.0, gt=0, description="Seconds to wait for a job that has its machines."
    )
    cleanup: Literal["keep", "delete"] = Field(
        default="delete", description="At the run's end; an attached job is always kept."
    )


class DeploymentProvisioning(_Provisioning):
    """The deployment that rollouts sample from. One policy version is served at a time."""

    deployment_id: _Id | None = Field(
        default=None, description="An existing deployment to use; by default the run creates one."
    )
    shape: _DeploymentShape | None = Field(
        default=None,
        description="accounts/<account>/deploymentShapes/<shape>; by default the training shape's.",
    )
    tokenizer_model: str | None = Field(
        default=None,
        min_length=1,
        description="Stands for the run's tokenizer_model, which the recipe names here.",
    )
    replicas: int = Field(default=1, ge=1)
    region: str | None = Field(default=None, min_length=1)
    weight_sync_scope: Literal["per_trainer", "per_deployment"] = Field(
        default="per_trainer", description="Whose bucket transfers the snapshots."
    )
    transition_type: Literal["async", "sync"] | None = Field(
        default=None,
        description="Whether new weights are swapped under requests in flight, or wait for them.",
    )
    hotload_timeout: float = Field(
        default=600.0,
        gt=0,
        le=MAX_HOTLOAD,
        description="Seconds until all replicas serve new weights.",
    )
    cleanup: Literal["keep", "scale_to_zero", "delete"] = Field(
        default="delete",
        description="At the run's end; an attached deployment is always kept.",
    )
