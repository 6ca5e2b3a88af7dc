"""What is true of a run whatever it trains on: one suite for serverless and for dedicated."""

import time
from pathlib import Path
from typing import Any

import pytest

from backends.conftest import Run, Service
from everburn.config import parse_config
from everburn.run_folder import stored_config
from workers.resume import rebuilt_state

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
    """What a configuration says about where it trains: all that differs."""
    fields: dict[str, Any] = request.param
    return fields


async def nothing_is_left(run: Run) -> None:
    """Neither session, job nor deployment of the run."""
    state = run.service.state
    assert [s for s in state["sessions"].values() if s["models"]] == []
    if stored_config(run.ref).dedicated:
        assert state["jobs"][run.resources.job_id] == "JOB_STATE_DELETED"
        assert run.resources.deployment_id not in state["deployments"]


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
    again = await service.go_on(run.ref, config.model_dump(mode="json"), state)
    result = await again.result()
    assert result.steps == 6
    assert [entry.version for entry in again.ledger] == [1, 2, 3, 4, 5, 6]
    await again.verified()
    await nothing_is_left(again)


async def test_a_trainer_that_is_taken_away_in_a_step_is_replaced(
    service: Service, tmp_path: Path, backend: dict[str, Any]
) -> None:
    config = parse_config({"rollout": "a:b", "dataset": "x", "base_model": "m"} | backend)
    kind = "preempt_job" if config.dedicated else "expire_session"
    service.emulator.plan_fault("optim_step", kind, after=2)
    run = await service.start(tmp_path, **backend)
    result = await run.result()
    assert result.steps == 4
    epochs = [entry.epoch for entry in run.ledger]
    assert epochs == sorted(epochs)
    assert epochs[0] < epochs[2]  # on a busy machine other leases may be lost, too
    await run.verified()
    await nothing_is_left(run)


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step"])
async def test_what_a_broken_connection_leaves_in_doubt_is_done_once(
    service: Service, tmp_path: Path, backend: dict[str, Any], operation: str
) -> None:
    """The service has applied it, and would apply it again if it were sent again."""
    service.admin("unknowns", applies_repetitions=True)
    run = await service.start(tmp_path, **backend)
    await run.until_step(1)
    service.emulator.plan_fault(operation, "drop", applied=True)
    assert (await run.result()).steps == 4
    assert service.emulator.admin("GET", "faults") == {"faults": []}
    epochs = [entry.epoch for entry in run.ledger]
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
