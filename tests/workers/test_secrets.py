"""A planted key is found nowhere: not in files, logs, histories, output or error texts.

Two runs by real processes, against a server that repeats the key in its errors. Half a minute, for
it takes everything that could leave a trace.
"""

import json
from pathlib import Path
from typing import Any

from everburn.emulator import base_model
from support.command_line import Everburn
from support.emulator import RunningEmulator
from workers.ports import free_port

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


def test_a_planted_key_leaves_no_trace(everburn: Everburn, emulator: RunningEmulator) -> None:
    (everburn.folder / "sums.py").write_text(TASK)
    (everburn.folder / "run.json").write_text(json.dumps(config(emulator)))
    ports = [f"--{name}={free_port()}" for name in ("port", "ui-port", "emulator-port")]

    # A lease lost, a promotion tried again, rollouts that fail: each with the key in its text.
    emulator.plan_fault("optim_step", "status", status=410, message=f"for {KEY}")
    emulator.plan_fault("promote", "status", status=400, message=f"for {KEY}")
    done = everburn("run", "run.json", "--id", "survives", *ports, FIREWORKS_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert emulator.admin("GET", "faults") == {"faults": []}
    assert "model: accounts/everburn/models/a-model" in done.stdout
    assert "promotion, attempt 1" in done.stdout

    emulator.plan_fault("create_session", "status", status=401, message=f"bad key {KEY}", count=99)
    failed = everburn("run", "run.json", "--id", "fails", *ports, FIREWORKS_API_KEY=KEY)
    assert failed.returncode == 1
    assert "the API key in FIREWORKS_API_KEY is refused" in failed.stdout
    assert "bad key [secret]" in failed.stdout

    for output in (done.stdout, done.stderr, failed.stdout, failed.stderr):
        assert KEY not in output
    # Histories are in the server's database, logs and state beside it, the run's files in runs/.
    files = [path for path in everburn.folder.rglob("*") if path.is_file()]
    assert {"temporal.db", "ledger", "survives"} <= _names(files)
    assert [str(path) for path in files if KEY.encode() in path.read_bytes()] == []


def _names(files: list[Path]) -> set[str]:
    return {part for path in files for part in path.parts}
