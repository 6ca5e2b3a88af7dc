"""A planted key appears in no file, log, history, output or error text.

Two runs by real processes on each backend, against a server that repeats the key in its errors and
states. Half a minute each, for it takes everything that could leave a trace.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fireworks.training.sdk import TrainerJobConfig, TrainerJobManager

from everburn.emulator.models import base_model
from support.emulator import RunningEmulator
from support.stacks import running_stack

KEY = "fw_planted_5b0c8a3e71d94f26"

TASK = """
import os
from everburn import RecoverableRolloutError, RolloutRun, RolloutSample

def make_rollout_fn(setup):
    async def rollout_fn(sample_prompt, rollout_idx, cursor_index):
        if cursor_index == 0 and rollout_idx == 0:
            raise RecoverableRolloutError("judge refused " + os.environ["FIREWORKS_API_KEY"])
        prompt = setup.tokenizer.encode(sample_prompt["prompt"])
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        reward = float(rollout_idx % 2)
        return RolloutRun([RolloutSample.of_turn(prompt, sample.tokens, sample.logprobs, reward)])
    return rollout_fn

def rows():
    return [{"prompt": f"1{index}+2{index}="} for index in range(4)]
"""


def config(emulator: RunningEmulator) -> dict[str, Any]:
    return {
        "rollout": "sums:make_rollout_fn",
        "dataset": {"name": "sums:rows"},
        "base_model": base_model.TINY,
        "tokenizer_model": str(base_model.ensure(base_model.TINY)),
        "lora_rank": 4,
        "backend": "serverless",
        "base_url": emulator.base_url,
        "prompt_groups_per_step": 2,
        "max_completion_tokens": 4,
        "publication_tolerance": 0.01,
        "output_model_id": "a-model",
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sums.py").write_text(TASK)
    return tmp_path.resolve()


def test_a_planted_key_leaves_no_trace(folder: Path, emulator: RunningEmulator) -> None:
    (folder / "run.json").write_text(json.dumps(config(emulator)))
    with running_stack(folder, FIREWORKS_API_KEY=KEY) as everburn:
        # A lease failure, a repeated promotion, failed rollouts: each with the key in its text.
        emulator.plan_fault("optim_step", "status", status=410, message=f"for {KEY}")
        emulator.plan_fault("promote", "status", status=400, message=f"for {KEY}")
        done = everburn("run", "run.json", "--id", "survives", FIREWORKS_API_KEY=KEY)
        assert done.returncode == 0, done.stdout + done.stderr
        assert emulator.admin("GET", "faults") == {"faults": []}
        assert "model: accounts/everburn/models/a-model" in done.stdout
        assert "promotion, attempt 1" in done.stdout

        refusal = {"status": 401, "message": f"bad key {KEY}", "count": 99}
        emulator.plan_fault("create_session", "status", **refusal)
        failed = everburn("run", "run.json", "--id", "fails", FIREWORKS_API_KEY=KEY)
        assert failed.returncode == 1
        assert "the API key in FIREWORKS_API_KEY is refused" in failed.stdout
        assert "bad key [secret]" in failed.stdout

    check_no_trace(folder, done, failed)


@pytest.mark.chaos  # two runs; the other test covers the same code
def test_a_planted_key_leaves_no_trace_in_dedicated_training(
    folder: Path, emulator: RunningEmulator
) -> None:
    values = config(emulator) | {
        "backend": "dedicated",
        "base_url": emulator.url,
        "trainer": {"job_id": "planted"},
        "deployment": {"shape": "accounts/everburn/deploymentShapes/tiny"},
        "output_model_id": "another-model",
    }
    (folder / "run.json").write_text(json.dumps(values))
    with TrainerJobManager(api_key="fw_local", base_url=emulator.url) as jobs:
        jobs.create_and_wait(
            TrainerJobConfig(
                base_model=base_model.TINY,
                lora_rank=4,
                requested_job_id="planted",
                auto_select_training_shape=True,
            )
        )
    ended = {"state": "JOB_STATE_FAILED", "message": f"failed for {KEY}"}
    emulator.admin("POST", "jobs/planted", ended)

    with running_stack(folder, FIREWORKS_API_KEY=KEY) as everburn:
        # A job's end, a waiting deployment, a lease failure, a repeated promotion.
        emulator.plan_fault("deployments", "status", status=409, message=f"wait, {KEY}")
        emulator.plan_fault("hot_load", "status", status=400, message=f"for {KEY}", after=1)
        emulator.plan_fault("promote", "status", status=400, message=f"for {KEY}")
        done = everburn("run", "run.json", "--id", "survives", FIREWORKS_API_KEY=KEY)
        assert done.returncode == 0, done.stdout + done.stderr
        assert emulator.admin("GET", "faults") == {"faults": []}
        assert "model: accounts/everburn/models/another-model" in done.stdout
        assert "promotion, attempt 1" in done.stdout

        emulator.plan_fault("deployments", "status", status=401, message=f"bad key {KEY}")
        failed = everburn("run", "run.json", "--id", "fails", FIREWORKS_API_KEY=KEY)
        assert failed.returncode == 1
        assert "the API key in FIREWORKS_API_KEY is refused" in failed.stdout
        assert "bad key [secret]" in failed.stdout

    history = (folder / ".everburn" / "temporal.db").read_bytes()
    assert b"which was failed (failed for [secret])" in history
    assert b"wait, [secret]" in history
    check_no_trace(folder, done, failed)


def check_no_trace(folder: Path, *commands: "subprocess.CompletedProcess[str]") -> None:
    for command in commands:
        assert KEY not in command.stdout + command.stderr
    # Histories are in the server's database, logs and state next to it, the run's files in runs/.
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"temporal.db", "ledger", "survives"} <= _names(files)
    assert [str(path) for path in files if KEY.encode() in path.read_bytes()] == []


def _names(files: list[Path]) -> set[str]:
    return {part for path in files for part in path.parts}
