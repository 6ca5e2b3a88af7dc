"""The resources of dedicated training that a run has.

Owns the record from which any worker finds (and cleans up) what was made for a run: ids are in it
before anything is created under them. Doesn't own what a configuration asks for
(config/provisioning.py), or the calls that create, look and delete (trainers/jobs.py).
"""

import hashlib
import re

from pydantic import BaseModel, ConfigDict

from everburn.config.provisioning import DeploymentResource, TrainerResource
from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore

RECORD_KEY = "provisioning.json"
MAX_NAME = 40
"""Characters of a run's id that enter the ids of its resources, which may have 63."""


class ResourceRecord(BaseModel):
    """What a run has, or is about to make. attempt: counts its jobs, since the id of a deleted job
    can't be used again. The `own_` flags: whether the run made it, and cleans it up."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    attempt: int = 1
    job_id: str
    own_job: bool
    deployment_id: str
    own_deployment: bool

    def next_attempt(self) -> "ResourceRecord":
        attempt = self.attempt + 1
        return self.model_copy(update={"attempt": attempt, "job_id": f"{self.name}-{attempt}"})


def find_resources(store: ArtifactStore) -> ResourceRecord | None:
    found = store.find_json(RECORD_KEY)
    return None if found is None else ResourceRecord.model_validate(found)


def put_resources(store: ArtifactStore, record: ResourceRecord) -> ResourceRecord:
    store.put_json(RECORD_KEY, record.model_dump(mode="json"))
    return record


def readable_name(run_id: str) -> str:
    """What the names of a run's resources begin with: its id, as far as it fits."""
    readable = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:MAX_NAME].rstrip("-")
    return f"eb-{readable}-" if readable else "eb-"


def resource_name(run: RunRef, chain: str) -> str:
    """The name of a run's resources: with a digest that tells runs of the same id apart."""
    digest = hashlib.sha256(f"{run.id}/{chain}".encode()).hexdigest()[:8]
    return readable_name(run.id) + digest


def planned_resources(
    run: RunRef, chain: str, trainer: TrainerResource, deployment: DeploymentResource
) -> ResourceRecord:
    """The ids of a run that has nothing yet. The chain of its owner is unique, whatever other runs
    of the same id there are in the account."""
    name = resource_name(run, chain)
    return ResourceRecord(
        name=name,
        job_id=trainer.job_id or name,
        own_job=trainer.job_id is None,
        deployment_id=deployment.deployment_id or name,
        own_deployment=deployment.deployment_id is None,
    )
