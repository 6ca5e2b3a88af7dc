"""Dedicated training only: a job and a deployment to wait for, to fence and to give back."""

import asyncio
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from fireworks.training.sdk import DeploymentManager, TrainerJobConfig, TrainerJobManager
from temporalio import activity
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError

from activities import trainer as trainer_activities
from activities.liveness import RunLiveness
from backends.conftest import Run, Service, a_config
from everburn.emulator.models.base_model import TINY
from everburn.records.checkpoints import find_checkpoint
from everburn.records.ids import RunRef
from everburn.records.publications import current_publication
from everburn.records.run_folder import stored_config
from support.waiting import Gate, until
from workflows.restore import rebuilt_state

LORA = {"backend": "emulator-dedicated", "rows": 4}
FULL = LORA | {"lora_rank": 0, "learning_rate": 0.004}
WORST = {"applies_repetitions": True, "shares_full_parameters": True, "keeps_gradients": True}


@pytest.fixture
def frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease checks its session, and whether its run is open, often."""
    monkeypatch.setattr(trainer_activities, "PROBE_INTERVAL", 0.2)


def jobs(service: Service) -> TrainerJobManager:
    return TrainerJobManager(api_key="fw_local", base_url=service.emulator.url)


def deployments(service: Service) -> DeploymentManager:
    return DeploymentManager(api_key="fw_local", base_url=service.emulator.url)


async def gone(run: Run) -> None:
    """Return once the run has neither a job nor a deployment."""

    def nothing() -> bool:
        state = run.service.state
        deleted = state["jobs"].get(run.provisioned.job_id) == "JOB_STATE_DELETED"
        return deleted and run.provisioned.deployment_id not in state["deployments"]

    await until(nothing, lambda: run.service.state, 60)


# Waiting


async def test_a_run_waits_for_capacity_and_says_so(service: Service, tmp_path: Path) -> None:
    service.admin("capacity", available=False)
    run = await service.start(tmp_path, **LORA)
    waiting = await run.until_waiting_for("pending, for lack of capacity")
    assert run.provisioned.job_id in waiting.waiting_for
    assert (await run.status()).lease_epoch == 1
    service.admin("capacity", available=True)
    assert (await run.result()).steps == 2


async def test_a_run_that_finds_no_capacity_in_time_fails(service: Service, tmp_path: Path) -> None:
    service.admin("capacity", available=False)
    run = await service.start(tmp_path, trainer={"pending_timeout": 0.5}, **LORA)
    failure = await run.failure()
    assert failure.type == "NotProvisioned"
    assert "pending, for lack of capacity" in failure.message
    await gone(run)


async def test_a_run_that_waits_can_be_cancelled(service: Service, tmp_path: Path) -> None:
    service.admin("capacity", available=False)
    run = await service.start(tmp_path, **LORA)
    await run.until_waiting_for("pending")
    await run.handle.cancel()
    with pytest.raises(WorkflowFailureError) as ended:
        await run.result()
    assert isinstance(ended.value.cause, CancelledError)
    await gone(run)


async def test_a_job_to_attach_to_must_exist(service: Service, tmp_path: Path) -> None:
    run = await service.start(tmp_path, trainer={"job_id": "nowhere"}, **LORA)
    failure = await run.failure()
    assert "there is no trainer job nowhere in account everburn" in failure.message
    assert run.provisioned.deployment_id not in service.state["deployments"]


# Keeping alive


@pytest.mark.chaos
async def test_a_job_is_kept_alive_while_its_run_is_paused_or_held(
    service: Service, tmp_path: Path, frequent_checks: None
) -> None:
    """The pause lasts longer than the inactivity timeout after which the service stops a job."""
    inactivity = 5.0
    with jobs(service) as manager:
        for job in ("watched", "guarded"):
            manager.create_and_wait(
                TrainerJobConfig(
                    base_model=TINY,
                    lora_rank=4,
                    requested_job_id=job,
                    auto_select_training_shape=True,
                    inactivity_timeout=timedelta(seconds=inactivity),
                )
            )
    broken = {"rollout": "support.small_numbers:make_broken_rollout_fn", "on_fatal": "hold"}
    held = await service.start(tmp_path, trainer={"job_id": "guarded"}, **LORA | broken)
    paused = await service.start(tmp_path, trainer={"job_id": "watched"}, **LORA | {"rows": 12})
    await held.until_waiting_for("resume, skip_row or stop")
    await paused.until_step(1)
    await paused.handle.execute_update("pause")
    since = time.monotonic()

    def long_enough() -> bool:
        state = service.state["jobs"]
        assert (state["watched"], state["guarded"]) == ("JOB_STATE_RUNNING", "JOB_STATE_RUNNING")
        return time.monotonic() - since > 2 * inactivity

    await until(long_enough, lambda: "the time doesn't pass", 60)
    await held.handle.signal("stop")
    await paused.handle.execute_update("resume")
    assert (await held.result()).stopped
    assert (await paused.result()).steps == 6
    assert {entry.lease_epoch for entry in paused.ledger} == {1}
    assert (await held.status()).lease_epoch == 1


# What the control plane refuses


async def test_an_exhausted_quota_holds_the_run_before_there_is_a_job(
    service: Service, tmp_path: Path
) -> None:
    service.emulator.plan_fault("rlorTrainerJobs", "status", status=402)
    run = await service.start(tmp_path, **LORA)
    assert "add credit" in ((await run.until_waiting_for("resume, skip_row or stop")).error or "")
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 2


async def test_an_exhausted_quota_at_a_publication_holds_the_run(
    service: Service, tmp_path: Path
) -> None:
    service.emulator.plan_fault("hot_load", "status", after=1, status=402)
    run = await service.start(tmp_path, **LORA)
    assert "add credit" in ((await run.until_waiting_for("resume, skip_row or stop")).error or "")
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 2
    await run.verified()


async def test_a_request_with_an_unreadable_answer_is_retried(
    service: Service, tmp_path: Path
) -> None:
    service.emulator.plan_fault("rlorTrainerJobs", "malformed")
    service.emulator.plan_fault("deployments", "malformed")
    run = await service.start(tmp_path, **LORA)
    assert (await run.result()).steps == 2
    assert service.emulator.admin("GET", "faults") == {"faults": []}


async def test_a_key_refused_during_a_recovery_fails_the_run(
    service: Service, tmp_path: Path
) -> None:
    run = await service.start(tmp_path, **LORA | {"rows": 16})
    await run.until_step(1)
    service.emulator.plan_fault(run.provisioned.job_id, "status", status=401)
    service.emulator.plan_fault("optim_step", "status", status=410)
    failure = await run.failure()
    assert failure.type == "KeyRefusedError"
    assert "the API key in FIREWORKS_API_KEY is refused" in failure.message
    assert (await run.status()).lease_epoch == 2, "a further lease was requested"
    await gone(run)


async def test_a_key_refused_during_a_recovery_can_be_fixed_while_the_run_holds(
    service: Service, tmp_path: Path
) -> None:
    run = await service.start(tmp_path, on_fatal="hold", **LORA | {"rows": 6})
    await run.until_step(1)
    service.emulator.plan_fault(run.provisioned.job_id, "status", status=403)
    service.emulator.plan_fault("optim_step", "status", status=410)
    held = await run.until_waiting_for("resume, skip_row or stop")
    assert "FIREWORKS_API_KEY lacks the permission" in (held.error or "")
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 3
    await run.verified()


async def test_deleting_the_attached_job_ends_the_run(service: Service, tmp_path: Path) -> None:
    with jobs(service) as manager:
        manager.create_and_wait(
            TrainerJobConfig(
                base_model=TINY,
                lora_rank=4,
                requested_job_id="lent",
                auto_select_training_shape=True,
            )
        )
        run = await service.start(tmp_path, trainer={"job_id": "lent"}, **LORA | {"rows": 16})
        await run.until_step(1)
        manager.delete("lent")
    failure = await run.failure()
    assert failure.type == "TrainerRejectedError"
    assert "to which trainer.job_id attaches, was deleted" in failure.message


# Cleanup


async def test_a_job_that_the_run_did_not_make_is_kept(service: Service, tmp_path: Path) -> None:
    with jobs(service) as manager:
        manager.create_and_wait(
            TrainerJobConfig(
                base_model=TINY,
                lora_rank=4,
                requested_job_id="ours",
                auto_select_training_shape=True,
            )
        )
    run = await service.start(
        tmp_path, trainer={"job_id": "ours"}, deployment={"cleanup": "scale_to_zero"}, **LORA
    )
    assert (await run.result()).steps == 2
    state = service.state
    assert state["jobs"]["ours"] == "JOB_STATE_RUNNING"
    assert state["deployments"][run.provisioned.deployment_id] == {"replicas": []}


async def test_a_cancelled_or_terminated_run_leaves_no_job_or_deployment(
    service: Service, tmp_path: Path, frequent_checks: None
) -> None:
    cancelled = await service.start(tmp_path, **LORA | {"rows": 40})
    terminated = await service.start(tmp_path, **LORA | {"rows": 40})
    await cancelled.until_step(1)
    await cancelled.handle.cancel()
    await terminated.until_step(1)
    await terminated.handle.terminate()
    await gone(cancelled)
    await gone(terminated)


async def test_a_resumed_run_keeps_what_its_terminated_incarnation_made(
    service: Service, tmp_path: Path, frequent_checks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminated incarnation's lease finds no open run. Its cleanup executes after the run was
    resumed."""
    asked, late = asyncio.Event(), Gate()
    check = RunLiveness.is_alive

    async def check_late(self: RunLiveness, run: RunRef, incarnation: int | None = None) -> bool:
        if activity.info().activity_type == "clean_up_provisioning":
            asked.set()
            await late.passed()
        return await check(self, run, incarnation)

    monkeypatch.setattr(RunLiveness, "is_alive", check_late)
    run = await service.start(tmp_path, **LORA | {"rows": 40})
    await run.until_step(1)
    job = run.provisioned.job_id
    await run.handle.terminate()
    await until(asked.is_set)
    config = stored_config(run.ref)
    state = rebuilt_state(run.ref, config, time.time())
    again = await service.continue_run(run.ref, config.model_dump(mode="json"), state)
    await again.until_step(state.step.committed + 1)
    late.open()
    await service.client.get_workflow_handle(f"{run.ref.id}/lease-1").result()
    assert service.state["jobs"][job] == "JOB_STATE_RUNNING"
    await again.handle.signal("stop")
    await again.result()
    assert again.provisioned.job_id == job
    await gone(again)


async def test_a_failed_run_leaves_no_job_or_deployment(service: Service, tmp_path: Path) -> None:
    run = await service.start(
        tmp_path, **LORA | {"rollout": "support.small_numbers:make_broken_rollout_fn"}
    )
    assert "broken on purpose" in (await run.failure()).message
    await gone(run)


# Where a run ends


@pytest.mark.parametrize("merged", [False, True])
async def test_an_adapter_is_promoted_as_it_is_or_merged_into_its_base_model(
    service: Service, tmp_path: Path, merged: bool
) -> None:
    model_id = f"adapter-merged-{merged}".lower()
    run = await service.start(tmp_path, output_model_id=model_id, output_merged=merged, **LORA)
    name = (await run.result()).model
    assert name == f"accounts/everburn/models/{model_id}"
    models = service.emulator.emulator.models
    promoted, weights = models.get(name), models.weights(name)
    kind = promoted.as_json()["kind"]
    assert kind == ("HF_BASE_MODEL" if merged else "HF_PEFT_ADDON")
    # Only the merged model has the base model's parameters, and none of an adapter's.
    assert ("model.embed_tokens.weight" in weights) == merged
    assert any(".lora_" in each for each in weights) != merged
    await gone(run)


# Where a run starts


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(LORA, id="lora"),
        pytest.param(FULL, id="full parameters", marks=pytest.mark.chaos),
    ],
)
async def test_a_run_starts_from_a_checkpoint_of_another_job(
    service: Service, tmp_path: Path, fields: dict[str, Any]
) -> None:
    first = await service.start(tmp_path, trainer={"cleanup": "keep"}, **fields)
    assert (await first.result()).steps == 2
    origin = f"cross_job://{first.provisioned.job_id}/state-2"

    second = await service.start(tmp_path, init_from_checkpoint=origin, **fields)
    assert (await second.result()).steps == 2
    assert second.provisioned.job_id != first.provisioned.job_id
    assert second.state_at(0) == first.state_at(2)
    assert (await second.verified()).steps == 2
    await gone(second)


async def test_a_serverless_run_cannot_start_from_a_jobs_checkpoint(
    service: Service, tmp_path: Path
) -> None:
    run = await service.start(
        tmp_path, backend="emulator", init_from_checkpoint="cross_job://some-job/state-2"
    )
    failure = await run.failure()
    assert failure.type == "OriginRefused"
    assert "dedicated trainer job" in failure.message


# Publication


@pytest.mark.parametrize("kind", ["hotload_error", "hotload_stuck"])
async def test_a_publication_that_fails_once_costs_a_recovery(
    service: Service, tmp_path: Path, kind: str
) -> None:
    service.emulator.plan_fault("hot_load", kind, after=1)
    run = await service.start(tmp_path, deployment={"hotload_timeout": 1.0}, **FULL)
    assert (await run.result()).steps == 2
    assert run.ledger[-1].lease_epoch == 2
    await run.verified()


async def test_a_publication_waits_for_replicas_that_load_one_by_one(
    service: Service, tmp_path: Path
) -> None:
    service.admin("hotload", seconds=0.3)
    run = await service.start(
        tmp_path, deployment={"replicas": 2}, publication_tolerance=1e-3, **LORA
    )
    assert (await run.result()).steps == 2
    assert run.ledger[-1].lease_epoch == 1
    assert min(entry.metrics["perf/weight_update_time"] for entry in run.ledger) > 0.6
    await run.verified()


async def test_a_publication_that_keeps_failing_ends_the_run_with_its_error(
    service: Service, tmp_path: Path
) -> None:
    run = await service.start(tmp_path, on_fatal="fail", **LORA | {"rows": 16})
    await run.until_step(1)
    service.emulator.plan_fault("hot_load", "hotload_error", count=10)
    failure = await run.failure()
    assert failure.type == "StepKillsTrainer"
    assert "injected fault: the weights can't be read" in failure.message


async def test_a_foreign_snapshot_in_place_of_the_runs_own_is_noticed(
    service: Service, tmp_path: Path, frequent_checks: None
) -> None:
    """An earlier holder whose last call took long does this."""
    run = await service.start(tmp_path, **LORA | {"rows": 12})
    await run.until_step(1)
    first = current_publication(run.store)
    assert first is not None
    await run.until_step(2)
    await run.handle.execute_update("pause")

    async def quiet() -> bool:
        status = await run.status()
        return not status.groups_in_flight and not status.groups_ready

    await until(quiet, lambda: "the run doesn't settle", 60)
    with deployments(service) as manager:
        manager.hotload(run.provisioned.deployment_id, TINY, first.snapshot)

    async def replaced() -> bool:
        return (await run.status()).lease_epoch >= 2

    await until(replaced, lambda: "the lease isn't replaced", 60)
    await run.handle.execute_update("resume")
    assert (await run.result()).steps == 6
    await run.verified()


# The unknowns at their worst


@pytest.mark.parametrize("fields", [LORA, FULL], ids=["lora", "full parameters"])
@pytest.mark.parametrize(
    ("operation", "kind", "details"),
    [
        # The old holder's gradients stay where the new one adds its own.
        ("forward_backward", "status", {"status": 410, "applied": True}),
        # The update is applied, its answer is lost, and the repetition is applied again.
        ("forward_backward", "drop", {"applied": True}),
        ("optim_step", "drop", {"applied": True}),
        ("optim_step", "preempt_job", {}),
        ("load_weights", "drop", {"applied": True}),
    ],
)
@pytest.mark.chaos
async def test_every_step_is_applied_once(
    service: Service,
    tmp_path: Path,
    fields: dict[str, Any],
    operation: str,
    kind: str,
    details: dict[str, Any],
) -> None:
    service.admin("unknowns", **WORST)
    run = await service.start(tmp_path, **fields | {"rows": 8})
    await run.until_step(1)
    if operation == "load_weights":
        service.emulator.plan_fault("optim_step", "status", status=410)
    service.emulator.plan_fault(operation, kind, **details)
    assert (await run.result()).steps == 4
    assert service.emulator.admin("GET", "faults") == {"faults": []}
    assert run.ledger[-1].lease_epoch == (3 if operation == "load_weights" else 2)
    service.admin("unknowns")
    assert (await run.verified()).steps == 4


async def test_a_new_holder_starts_from_the_saved_state_only(
    service: Service, tmp_path: Path
) -> None:
    service.admin("unknowns", **WORST)
    run = await service.start(tmp_path, **FULL | {"rows": 8})
    await run.until_step(1)
    service.emulator.plan_fault("forward_backward", "status", status=410, applied=True)
    assert (await run.result()).steps == 4
    assert run.ledger[-1].lease_epoch == 2
    service.admin("unknowns")
    assert (await run.verified()).steps == 4


async def test_a_run_does_not_start_from_weights_that_an_earlier_run_trained(
    service: Service, tmp_path: Path
) -> None:
    """Both runs are attached to one job, whose models share weights, optimizer and gradients."""
    service.admin("unknowns", **WORST)
    with jobs(service) as manager:
        manager.create_and_wait(
            TrainerJobConfig(
                base_model=TINY,
                lora_rank=0,
                requested_job_id="theirs",
                auto_select_training_shape=True,
            )
        )
    attached = FULL | {"trainer": {"job_id": "theirs"}}
    first = await service.start(tmp_path, **attached)
    assert (await first.result()).steps == 2
    second = await service.start(tmp_path, **attached)
    failure = await second.failure()
    assert (
        "job theirs trains all parameters, and an earlier model of it has saved" in failure.message
    )
    assert "Set init_from_checkpoint" in failure.message
    assert second.store.keys("checkpoints") == []
    assert second.provisioned.deployment_id not in service.state["deployments"]

    start = find_checkpoint(first.store, 0)
    assert start is not None
    third = await service.start(tmp_path, init_from_checkpoint=start.path, **attached)
    assert (await third.result()).steps == 2
    service.admin("unknowns")
    for run in (first, third):
        assert (await run.verified()).steps == 2


def test_the_backends_configurations_differ_in_one_field(tmp_path: Path) -> None:
    local, dedicated = a_config(tmp_path), a_config(tmp_path, backend="emulator-dedicated")
    assert {key for key in dedicated if dedicated[key] != local.get(key)} == {"backend"}
