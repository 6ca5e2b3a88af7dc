"""Properties of a run on either backend: one suite for serverless and for dedicated."""

import time
from pathlib import Path
from typing import Any

import pytest

from backends.conftest import Run, Service
from everburn.config import parse_config
from everburn.records.run_folder import stored_config
from workflows.restore import rebuilt_state

SERVERLESS = {"backend": "emulator"}
DEDICATED = {"backend": "emulator-dedicated"}
FULL = DEDICATED | {"lora_rank": 0, "learning_rate": 0.004}


@pytest.fixture(
    params=[
        pytest.param(SERVERLESS, id="serverless"),
        pytest.param(DEDICATED, id="dedicated"),
        pytest.param(FULL, id="dedicated, full parameters", marks=pytest.mark.chaos),
    ]
)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The fields of a configuration that choose the backend: the only ones that differ."""
    fields: dict[str, Any] = request.param
    return fields


async def nothing_is_left(run: Run) -> None:
    """The run has left no session, job or deployment."""
    state = run.service.state
    assert [s for s in state["sessions"].values() if s["models"]] == []
    if stored_config(run.ref).dedicated:
        assert state["jobs"][run.provisioned.job_id] == "JOB_STATE_DELETED"
        assert run.provisioned.deployment_id not in state["deployments"]


async def test_training_improves(service: Service, tmp_path: Path, backend: dict[str, Any]) -> None:
    run = await service.start(tmp_path, rows=24, completions_per_prompt=16, **backend)
    result = await run.result()
    assert (result.steps, result.version) == (12, 12)
    assert sum(run.rewards[-3:]) / 3 > sum(run.rewards[:3]) / 3 + 0.15
    verified = await run.verified()
    assert verified.steps == 12
    await nothing_is_left(run)


async def test_a_stopped_run_is_resumed(
    service: Service, tmp_path: Path, backend: dict[str, Any]
) -> None:
    run = await service.start(tmp_path, rows=12, **backend)
    await run.until_step(2)
    await run.handle.signal("stop")
    stopped = await run.result()
    assert stopped.stopped
    await nothing_is_left(run)

    config = stored_config(run.ref)
    state = rebuilt_state(run.ref, config, time.time())
    again = await service.continue_run(run.ref, config.model_dump(mode="json"), state)
    result = await again.result()
    assert result.steps == 6
    assert [entry.version for entry in again.ledger] == [1, 2, 3, 4, 5, 6]
    await again.verified()
    await nothing_is_left(again)


async def test_a_trainer_that_fails_during_a_step_is_replaced(
    service: Service, tmp_path: Path, backend: dict[str, Any]
) -> None:
    config = parse_config({"rollout": "a:b", "dataset": "x", "base_model": "m"} | backend)
    kind = "preempt_job" if config.dedicated else "expire_session"
    service.emulator.plan_fault("optim_step", kind, after=2)
    run = await service.start(tmp_path, **backend)
    result = await run.result()
    assert result.steps == 4
    epochs = [entry.lease_epoch for entry in run.ledger]
    assert epochs == sorted(epochs)
    assert epochs[0] < epochs[2]  # on a busy machine other leases may fail, too
    await run.verified()
    await nothing_is_left(run)


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step"])
async def test_a_request_in_doubt_after_a_broken_connection_is_applied_once(
    service: Service, tmp_path: Path, backend: dict[str, Any], operation: str
) -> None:
    """The service has applied it, and would apply it again if it were sent again."""
    service.admin("unknowns", applies_repetitions=True)
    run = await service.start(tmp_path, **backend)
    await run.until_step(1)
    service.emulator.plan_fault(operation, "drop", applied=True)
    assert (await run.result()).steps == 4
    assert service.emulator.admin("GET", "faults") == {"faults": []}
    epochs = [entry.lease_epoch for entry in run.ledger]
    assert epochs == sorted(epochs)
    assert epochs[-1] >= 2
    await run.verified()


async def test_the_final_policy_becomes_a_model(
    service: Service, tmp_path: Path, backend: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    model_id = request.node.callspec.id.replace(", ", "-").replace(" ", "-")
    service.emulator.plan_fault("promote", "status", status=400, message="try again")
    run = await service.start(tmp_path, rows=4, output_model_id=model_id, **backend)
    result = await run.result()
    assert result.model == f"accounts/everburn/models/{model_id}"
    await nothing_is_left(run)


@pytest.mark.chaos
async def test_a_foreign_model_is_not_taken_for_the_runs_own(
    service: Service, tmp_path: Path, backend: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Then `everburn resume` promotes the run's final policy under another id."""
    taken = "taken-" + request.node.callspec.id.replace(", ", "-").replace(" ", "-")
    first = await service.start(tmp_path, rows=4, output_model_id=taken, **backend)
    assert (await first.result()).model == f"accounts/everburn/models/{taken}"

    run = await service.start(tmp_path, rows=4, output_model_id=taken, **backend)
    failure = await run.failure()
    assert failure.type == "PromotionFailed"
    assert f"accounts/everburn/models/{taken} exists already" in failure.message
    assert "--set output_model_id=ID" in failure.message
    notes = [note for note in (await run.status()).notes if note.startswith("promotion")]
    assert len(notes) == 1, "asked for once"
    await nothing_is_left(run)

    config = stored_config(run.ref).model_copy(update={"output_model_id": f"{taken}-2"})
    state = rebuilt_state(run.ref, config, time.time())
    again = await service.continue_run(run.ref, config.model_dump(mode="json"), state)
    result = await again.result()
    assert result.model == f"accounts/everburn/models/{taken}-2"
    assert result.steps == 2, "nothing is trained again"
    await nothing_is_left(again)


# Where a run starts


async def test_a_run_starts_from_another_runs_checkpoint(
    service: Service, tmp_path: Path, backend: dict[str, Any]
) -> None:
    first = await service.start(tmp_path, rows=4, **backend)
    path = (await first.result()).checkpoint
    assert path is not None

    second = await service.start(tmp_path, rows=2, init_from_checkpoint=path, **backend)
    result = await second.result()
    # Weights and optimizer are the other run's; steps and rows start from zero.
    assert second.state_at(0) == first.state_at(2)
    assert (result.steps, result.rows) == (1, 2)
    assert (await second.verified()).steps == 1
    await nothing_is_left(second)


@pytest.mark.chaos
@pytest.mark.parametrize("backend", [SERVERLESS, DEDICATED], ids=["serverless", "dedicated"])
async def test_a_run_starts_from_an_adapter_with_a_fresh_optimizer(
    service: Service, tmp_path: Path, backend: dict[str, Any]
) -> None:
    model_id = f"warm-{backend['backend']}"
    first = await service.start(tmp_path, rows=4, output_model_id=model_id, **backend)
    model = (await first.result()).model
    assert model == f"accounts/everburn/models/{model_id}"

    second = await service.start(tmp_path, rows=2, warm_start_from_adapter=model, **backend)
    assert (await second.result()).steps == 1
    (weights, optimizer), (trained, used) = second.state_at(0), first.state_at(2)
    assert (weights == trained, optimizer == used) == (True, False)
    assert (await second.verified()).steps == 1
    await nothing_is_left(second)


@pytest.mark.parametrize("backend", [SERVERLESS, DEDICATED], ids=["serverless", "dedicated"])
@pytest.mark.parametrize(
    ("origin", "text"),
    [
        ({"init_from_checkpoint": f"everburn/run-{'0' * 32}/state-4"}, "no checkpoint"),
        ({"warm_start_from_adapter": "accounts/everburn/models/none"}, "accounts/everburn/models"),
    ],
    ids=["checkpoint", "adapter"],
)
async def test_a_missing_origin_ends_the_run_before_any_rollout(
    service: Service, tmp_path: Path, backend: dict[str, Any], origin: dict[str, str], text: str
) -> None:
    run = await service.start(tmp_path, rows=2, **origin, **backend)
    failure = await run.failure()
    assert failure.type == "OriginRefused"
    (field,) = origin
    assert f"{field} can't be used" in failure.message and text in failure.message
    assert run.store.keys("rollouts") == []
    await nothing_is_left(run)
