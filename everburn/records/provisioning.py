"""The trainer job and the deployment that a run rents at the service.

Owns the record by which any worker finds and cleans up what was created for a run: it holds the ids
before anything is created under them. Doesn't own what a configuration requests
(config/provisioning.py), or the calls to the service (trainers/jobs.py).
"""

import hashlib
import re

from pydantic import BaseModel, ConfigDict

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore

RECORD_KEY = "provisioning.json"
MAX_NAME = 40
"""Characters of a run's id that enter the ids of its job and deployment, which may have 63."""


class ProvisioningRecord(BaseModel):
    """What a run has, or is about to create. attempt: counts its jobs, because the id of a deleted
    job can't be used again. own_job, own_deployment: whether the run creates and cleans it up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    attempt: int = 1
    job_id: str
    own_job: bool
    deployment_id: str
    own_deployment: bool

    def next_attempt(self) -> "ProvisioningRecord":
        attempt = self.attempt + 1
        return self.model_copy(update={"attempt": attempt, "job_id": f"{self.name}-{attempt}"})


def find_provisioning(store: ArtifactStore) -> ProvisioningRecord | None:
    found = store.find_json(RECORD_KEY)
    return None if found is None else ProvisioningRecord.model_validate(found)


def put_provisioning(store: ArtifactStore, record: ProvisioningRecord) -> ProvisioningRecord:
    store.put_json(RECORD_KEY, record.model_dump(mode="json"))
    return record


def readable_name(run_id: str) -> str:
    """The beginning of the name of a run's job and deployment: its id, as far as it fits."""
    readable = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:MAX_NAME].rstrip("-")
    return f"eb-{readable}-" if readable else "eb-"


def provisioned_name(run: RunRef, first_execution_id: str) -> str:
    """The name of a run's job and deployment; a digest distinguishes runs of the same id."""
    digest = hashlib.sha256(f"{run.id}/{first_execution_id}".encode()).hexdigest()[:8]
    return readable_name(run.id) + digest


def planned_provisioning(
    run: RunRef, first_execution_id: str, config: RunConfig
) -> ProvisioningRecord:
    """The ids for a run that has nothing yet; `first_execution_id` distinguishes runs of the same
    id in an account."""
    name = provisioned_name(run, first_execution_id)
    trainer, deployment = config.trainer_provisioning, config.deployment_provisioning
    return ProvisioningRecord(
        name=name,
        job_id=trainer.job_id or name,
        own_job=trainer.job_id is None,
        deployment_id=deployment.deployment_id or name,
        own_deployment=deployment.deployment_id is None,
    )
