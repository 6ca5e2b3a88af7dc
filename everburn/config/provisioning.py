"""The fields of `trainer` and `deployment`: what a configuration asks of dedicated training.

Doesn't own what a run has (records/provisioning.py).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

MAX_INACTIVITY = 3 * 3600.0
"""Seconds; the service refuses more."""


PENDING_TIMEOUT = 48 * 3600.0


MAX_HOTLOAD = 3600.0
"""Seconds; the run takes an operation of two hours for one that never ends."""


_SHAPE = re.compile(r"accounts/[^/]+/trainingShapes/[^/]+(/versions/[^/]+)?")


_DEPLOYMENT_SHAPE = re.compile(r"accounts/[^/]+/deploymentShapes/[^/]+(/versions/[^/]+)?")


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


_ResourceId = Annotated[str, AfterValidator(_check_id)]


class TrainerProvisioning(_Provisioning):
    """The trainer job. Without `job_id` the run makes its own."""

    training_shape: str | None = Field(
        default=None,
        description="accounts/<account>/trainingShapes/<shape>, its latest validated version "
        "unless one is named; by default Fireworks selects.",
    )
    job_id: _ResourceId | None = Field(default=None, description="An existing job to attach to.")
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
        default=3600.0, gt=0, description="Seconds to wait for a job that has found its machines."
    )
    cleanup: Literal["keep", "delete"] = Field(
        default="delete", description="At the run's end; an attached job is always kept."
    )

    @field_validator("training_shape")
    @classmethod
    def _check_shape(cls, value: str | None) -> str | None:
        if value is not None and not _SHAPE.fullmatch(value):
            raise ValueError(
                f"{value!r} isn't a training shape: write "
                "accounts/<account>/trainingShapes/<shape>[/versions/<version>]"
            )
        return value


class DeploymentProvisioning(_Provisioning):
    """The deployment that rollouts sample from. One policy version is served at a time."""

    deployment_id: _ResourceId | None = Field(
        default=None, description="An existing deployment to use; by default the run makes one."
    )
    shape: str | None = Field(
        default=None,
        description="accounts/<account>/deploymentShapes/<shape>; by default the training shape's.",
    )
    tokenizer_model: str | None = Field(
        default=None,
        min_length=1,
        description="As the recipe names it here; stands for the run's own tokenizer_model.",
    )
    replicas: int = Field(default=1, ge=1)
    region: str | None = Field(default=None, min_length=1)
    weight_sync_scope: Literal["per_trainer", "per_deployment"] = Field(
        default="per_trainer", description="Whose bucket snapshots go through."
    )
    transition_type: Literal["async", "sync"] | None = Field(
        default=None,
        description="What new weights do to requests in flight: swap under them, or wait.",
    )
    hotload_timeout: float = Field(
        default=600.0,
        gt=0,
        le=MAX_HOTLOAD,
        description="Seconds for new weights to be served everywhere.",
    )
    cleanup: Literal["keep", "scale_to_zero", "delete"] = Field(
        default="delete", description="At the run's end; one the run didn't make is always kept."
    )

    @field_validator("shape")
    @classmethod
    def _check_shape(cls, value: str | None) -> str | None:
        if value is not None and not _DEPLOYMENT_SHAPE.fullmatch(value):
            raise ValueError(
                f"{value!r} isn't a deployment shape: write "
                "accounts/<account>/deploymentShapes/<shape>[/versions/<version>]"
            )
        return value
