"""A run's trainer job and deployment: made, waited for, attached again, cleaned up, all by ids.

Owns the calls to the control plane, through the SDK's managers, and what each state asks for.
Every call is short and may be repeated by any worker at any time: what there is, is looked up, and
what a run may have is in its record before it is made. Doesn't own the waiting (the TrainerLease
workflow) or what is trained (dedicated.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.records.provisioning import (
    ResourceRecord,
    find_resources,
    planned_resources,
    put_resources,
)
from everburn.records.run_folder import run_owner
from everburn.records.store import ArtifactStore, StoreError
from everburn.trainers.backends import UnreachableError, api_key, api_root, check_reachable
from everburn.trainers.errors import describe, status_of, translated
from everburn.trainers.hotload import NOT_READY
from everburn.trainers.protocol import TrainerError, TrainerRejectedError, TrainerUnavailableError

if TYPE_CHECKING:
    from fireworks.training.sdk import DeploymentInfo, DeploymentManager, TrainerJobManager

RESUMABLE = frozenset(
    {"JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_PAUSED", "JOB_STATE_COMPLETED"}
)
GONE = frozenset({"JOB_STATE_DELETED", "JOB_STATE_ARCHIVED", "JOB_STATE_DELETING"})
BROKEN_DEPLOYMENT = frozenset({"FAILED", "DELETED", "DELETING"})
AT_ONCE: dict[str, float] = {"poll_interval_s": 0, "timeout_s": 0, "pending_timeout_s": 0}
"""The SDK's waits as single looks: TimeoutError where it isn't so yet."""
LOOKS = 3
"""Looks at once: something that is made in no time needn't be waited for."""


@dataclass(frozen=True)
class Readiness:
    """How far a run's resources are. stage: `pending` waits for capacity, which may take days.
    resumed: a stopped job was started again just now, and `text` says how it had ended."""

    stage: Literal["ready", "pending", "starting"]
    text: str = ""
    resumed: bool = False


class RunResources:
    """The job and the deployment of one run."""

    def __init__(self, run: RunRef, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._store = ArtifactStore.of(run)

    def advance(self) -> Readiness:
        """Do what can be done now towards a running job and a ready deployment.

        Raises:
            TrainerRejectedError: says what is refused, and what to change.
            TrainerClosedError: the account may not have it.
            TrainerCapacityError: the control plane has no room for it now.
            TrainerUnavailableError: the control plane can't be reached.
            StoreError: what the run may have can't be recorded, or looked up.
        """
        with _managers(self._config) as (jobs, deployments):
            for _ in range(LOOKS):
                found = self._advance(jobs, deployments, self._record())
                if found.stage == "ready" or found.resumed:
                    break
        return found

    def clean_up(self) -> str:
        """Give back what the run made, as its configuration says; returns what was done. What can't
        be given back keeps nothing else.

        Raises:
            TrainerUnavailableError: something couldn't be given back yet; says what, and what was.
            StoreError: what the run has can't be looked up.
        """
        record = find_resources(self._store)
        if record is None:
            return "nothing was made"
        done: list[str] = []
        failed: list[str] = []
        with _managers(self._config) as (jobs, deployments):
            both: dict[str, Callable[[], str]] = {
                _deployment(record): lambda: self._clean_up_deployment(deployments, record),
                _job(record): lambda: self._clean_up_job(jobs, record),
            }
            for what, clean_up in both.items():
                try:
                    with _translated(what, self._config):
                        done.append(clean_up())
                except TrainerError as error:
                    failed.append(str(error))
        text = "; ".join([*failed, *done])
        if failed:
            raise TrainerUnavailableError(text)
        return text

    def _record(self) -> ResourceRecord:
        found = find_resources(self._store)
        if found is not None:
            return found
        chain = run_owner(self._store).chain
        trainer, deployment = self._config.trainer_resource, self._config.deployment_resource
        return put_resources(self._store, planned_resources(self._run, chain, trainer, deployment))

    def _advance(
        self, jobs: "TrainerJobManager", deployments: "DeploymentManager", record: ResourceRecord
    ) -> Readiness:
        if self._config.deployment_resource.weight_sync_scope == "per_deployment":
            # The job is made for the deployment's bucket, so the deployment comes first.
            deployment = self._advance_deployment(jobs, deployments, record, None)
            job = self._advance_job(jobs, record)
        else:
            job = self._advance_job(jobs, record)
            if job.stage == "pending" or job.resumed:
                return job  # replicas would wait idle for a trainer that is queued
            name = f"accounts/{jobs.account_id}/rlorTrainerJobs/{self._record().job_id}"
            deployment = self._advance_deployment(jobs, deployments, record, name)
        return job if job.stage != "ready" else deployment

    # The job

    def _advance_job(self, jobs: "TrainerJobManager", record: ResourceRecord) -> Readiness:
        job = jobs.try_get(record.job_id)
        if job is not None and job.get("state") in GONE and record.own_job:
            record = put_resources(self._store, record.next_attempt())
            job = jobs.try_get(record.job_id)
        if job is None:
            return self._create_job(jobs, record)
        what, state = _job(record), str(job.get("state", ""))
        if state in GONE:
            raise TrainerRejectedError(
                f"{what}, to which trainer.job_id attaches, was deleted: name another, or none"
            )
        if state in RESUMABLE:
            with suppress(TimeoutError):  # it would wait in this process, for days if need be
                jobs.resume_and_wait(record.job_id, **AT_ONCE)
            return Readiness("starting", f"{what}, which was {_said(job)}", resumed=True)
        if state == "JOB_STATE_PENDING":
            return Readiness("pending", f"{what}: pending, for lack of capacity")
        if state != "JOB_STATE_RUNNING":
            return Readiness("starting", f"{what}: {_said(job)}")
        try:
            jobs.wait_for_ready(record.job_id, **AT_ONCE)
        except TimeoutError:
            return Readiness("starting", f"{what}: running, and not answering yet")
        return Readiness("ready")

    def _create_job(self, jobs: "TrainerJobManager", record: ResourceRecord) -> Readiness:
        from fireworks.training.sdk import TrainerJobConfig

        if not record.own_job:
            raise TrainerRejectedError(
                f"there is no trainer job {record.job_id} in account {jobs.account_id}, to which "
                "trainer.job_id attaches: name an existing job, or leave it out"
            )
        wish = self._config.trainer_resource
        shape = jobs.resolve_training_profile(wish.training_shape) if wish.training_shape else None
        per_deployment = self._config.deployment_resource.weight_sync_scope == "per_deployment"
        jobs.create(
            TrainerJobConfig(
                base_model=self._config.base_model,
                lora_rank=self._config.lora_rank,
                requested_job_id=record.job_id,
                display_name=f"everburn {self._run.id}"[:63],
                # Without a version the parent shape: the control plane takes its latest.
                training_shape_ref=wish.training_shape,
                auto_select_training_shape=shape is None,
                max_context_length=None if shape is not None else wish.max_context_length,
                trainer_replica_count=wish.replicas,
                region=wish.region,
                use_reservation=wish.use_reservation,
                reservation_target=wish.reservation_target,
                inactivity_timeout=timedelta(seconds=wish.inactivity_timeout),
                hot_load_deployment_id=record.deployment_id if per_deployment else None,
            )
        )
        return Readiness("starting", f"{_job(record)}: created")

    def _clean_up_job(self, jobs: "TrainerJobManager", record: ResourceRecord) -> str:
        what = _job(record)
        if not record.own_job or self._config.trainer_resource.cleanup == "keep":
            return f"{what} is kept, and stops by itself when it is idle"
        job = jobs.try_get(record.job_id)
        if job is None or job.get("state") in GONE:
            return f"{what} is deleted"
        jobs.delete(record.job_id)  # only logs what fails
        job = jobs.try_get(record.job_id)
        if job is not None and job.get("state") not in GONE:
            raise TrainerUnavailableError(f"{what} couldn't be deleted: it is {_said(job)}")
        return f"{what} is deleted"

    # The deployment

    def _advance_deployment(
        self,
        jobs: "TrainerJobManager",
        deployments: "DeploymentManager",
        record: ResourceRecord,
        trainer: str | None,
    ) -> Readiness:
        what = _deployment(record)
        found = deployments.get(record.deployment_id)
        if found is None or (found.state in BROKEN_DEPLOYMENT and record.own_deployment):
            found = self._create_deployment(jobs, deployments, record, trainer)
        elif found.state in BROKEN_DEPLOYMENT:
            raise TrainerRejectedError(f"{what} is {found.state}: name another, or none")
        elif changes := self._changes(found, trainer):
            _update(deployments, record.deployment_id, changes)
            return Readiness("starting", f"{what}: taking another trainer's weights")
        try:
            deployments.wait_for_ready(record.deployment_id, timeout_s=0.1, poll_interval_s=0.1)
        except TimeoutError:
            return Readiness("starting", f"{what}: {found.state.lower()}")
        try:
            status = deployments.hotload_check_status(record.deployment_id, self._config.base_model)
        except Exception as error:
            if status_of(error) not in NOT_READY:
                raise
            return Readiness("starting", f"{what}: {describe(error)}")
        if not status.get("replicas"):
            if record.own_deployment:
                _update(deployments, record.deployment_id, self._replicas())
            return Readiness("starting", f"{what}: no replica yet")
        return Readiness("ready")

    def _create_deployment(
        self,
        jobs: "TrainerJobManager",
        deployments: "DeploymentManager",
        record: ResourceRecord,
        trainer: str | None,
    ) -> "DeploymentInfo":
        from fireworks.training.sdk import DeploymentConfig

        if not record.own_deployment:
            raise TrainerRejectedError(
                f"there is no deployment {record.deployment_id} in account "
                f"{deployments.account_id}: name an existing one as deployment.deployment_id, or "
                "leave it out"
            )
        wish = self._config.deployment_resource
        return deployments.create_or_get(
            DeploymentConfig(
                deployment_id=record.deployment_id,
                base_model=self._config.base_model,
                description=f"everburn run {self._run.id}",
                deployment_shape=self._deployment_shape(jobs),
                region=wish.region,
                min_replica_count=wish.replicas,
                max_replica_count=wish.replicas,
                hot_load_trainer_job=trainer,
                hot_load_transition_type=wish.transition_type,
                for_training=True,
            )
        )

    def _deployment_shape(self, jobs: "TrainerJobManager") -> str | None:
        shape = self._config.deployment_resource.shape
        training = self._config.trainer_resource.training_shape
        if shape is not None or training is None:
            return shape
        return jobs.resolve_training_profile(training).deployment_shape or None

    def _changes(self, found: "DeploymentInfo", trainer: str | None) -> "list[_Change]":
        """What an existing deployment must be told."""
        changes: list[_Change] = []
        if trainer is not None and found.hot_load_trainer_job != trainer:
            changes.append(("hot_load_trainer_job", "hotLoadTrainerJob", trainer))
        wish = self._config.deployment_resource
        transition = (wish.transition_type or "").upper()
        if transition and (found.hot_load_transition_type or "ASYNC") != transition:
            changes.append(("hot_load_transition_type", "hotLoadTransitionType", transition))
        return changes

    def _replicas(self) -> "list[_Change]":
        count = self._config.deployment_resource.replicas
        return [
            ("min_replica_count", "minReplicaCount", count),
            ("max_replica_count", "maxReplicaCount", count),
        ]

    def _clean_up_deployment(self, deployments: "DeploymentManager", record: ResourceRecord) -> str:
        what = _deployment(record)
        cleanup = self._config.deployment_resource.cleanup
        if not record.own_deployment or cleanup == "keep":
            return f"{what} is kept, and costs as long as it has replicas"
        found = deployments.get(record.deployment_id)
        if found is None or found.state in BROKEN_DEPLOYMENT:
            return f"{what} is deleted"
        if cleanup == "scale_to_zero":
            deployments.scale_to_zero(record.deployment_id)  # only logs what fails
            status = deployments.hotload_check_status(record.deployment_id, self._config.base_model)
            if status.get("replicas"):
                raise TrainerUnavailableError(f"{what} still has replicas")
            return f"{what} is scaled to zero"
        deployments.delete(record.deployment_id)  # only logs what fails
        found = deployments.get(record.deployment_id)
        if found is not None and found.state not in BROKEN_DEPLOYMENT:
            raise TrainerUnavailableError(f"{what} couldn't be deleted: it is {found.state}")
        return f"{what} is deleted"


_Change = tuple[str, str, str | int]
"""A field's path, its name in JSON, its new value."""


def _update(deployments: "DeploymentManager", deployment: str, changes: list[_Change]) -> None:
    deployments.update(
        deployment,
        body={name: value for _, name, value in changes},
        update_mask=[path for path, _, _ in changes],
    )


@contextmanager
def _managers(
    config: RunConfig,
) -> "Iterator[tuple[TrainerJobManager, DeploymentManager]]":
    """The SDK's managers; their errors become ours."""
    from fireworks.training.sdk import DeploymentManager, TrainerJobManager

    root = api_root(config)
    try:
        check_reachable(root)
    except UnreachableError as error:
        raise TrainerUnavailableError(str(error)) from error
    with _translated(f"the control plane at {root}", config):
        key = api_key(config)
        with (
            TrainerJobManager(api_key=key, base_url=root) as jobs,
            DeploymentManager(api_key=key, base_url=root) as deployments,
        ):
            yield jobs, deployments


@contextmanager
def _translated(operation: str, config: RunConfig) -> Iterator[None]:
    """The SDK's errors as ours: see errors.py. The store's stay what they are."""
    try:
        yield
    except (TrainerError, StoreError):
        raise
    except Exception as error:
        raise translated(error, operation, config.api_key_env, opening=True) from error


def _job(record: ResourceRecord) -> str:
    return f"trainer job {record.job_id}"


def _deployment(record: ResourceRecord) -> str:
    return f"deployment {record.deployment_id}"


def _said(job: dict[str, Any]) -> str:
    """A job's state and the control plane's word on it."""
    state = str(job.get("state", "")).removeprefix("JOB_STATE_").lower()
    status = job.get("status")
    message = status.get("message") if isinstance(status, dict) else job.get("statusMessage")
    return f"{state} ({message})" if message else state
