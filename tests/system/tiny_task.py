"""A small task for the emulator's tiny model, whose rewards vary, and a record of its executions.

Two turns of a few tokens; the reward is a number computed from the sampled tokens. It has no
meaning, but every step changes weights. Each execution of the rollout function records its start
and its end, so that an audit can detect repeated executions.
"""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup

MODEL = "accounts/everburn/models/tiny"
SEPARATOR = 3
"""The token between the turns."""
BACKENDS: dict[str, dict[str, Any]] = {
    "serverless": {"backend": "emulator"},
    # Trains all parameters, which the models of a dedicated job may share.
    "dedicated": {"backend": "emulator-dedicated", "lora_rank": 0, "learning_rate": 0.002},
}
"""Configuration fields by backend."""


@dataclass(frozen=True)
class Execution:
    """The start or the end of a call of the rollout function. at: seconds since 1970."""

    event: Literal["begun", "returned"]
    row: int
    completion: int
    pid: int
    at: float

    @property
    def place(self) -> tuple[int, int]:
        return self.row, self.completion


def rows(count: int) -> list[dict[str, Any]]:
    return [{"row": index} for index in range(count)]


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """extras: `executions`, the file in which calls are recorded; `pause`, seconds per turn."""

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int, evaluation: bool
    ) -> RolloutRun:
        if evaluation:
            return await play(setup, sample_prompt["row"])
        note(setup, "begun", cursor_index, rollout_idx)
        run = await play(setup, sample_prompt["row"])
        note(setup, "returned", cursor_index, rollout_idx)
        return run

    return rollout_fn


async def play(setup: RolloutSetup, row: int) -> RolloutRun:
    """Two turns; one segment whose sampled tokens are trained."""
    tokens = [4 + row % 40, 7]
    logprobs, mask, total = [0.0, 0.0], [0, 0], 0
    for _ in range(2):
        sample = await setup.sampler.sample(tokens, **setup.sampling_kwargs)
        await asyncio.sleep(float(setup.extras.get("pause", 0.0)))
        tokens = [*tokens, *sample.tokens, SEPARATOR]
        logprobs = [*logprobs, *sample.logprobs, 0.0]
        mask = [*mask, *[1] * len(sample.tokens), 0]
        total += sum(sample.tokens)
    reward = total % 7 / 6
    return RolloutRun([RolloutSample(tokens, logprobs, mask, reward)])


def note(
    setup: RolloutSetup, event: Literal["begun", "returned"], row: int, completion: int
) -> None:
    """Append a line that survives the process's death."""
    line = json.dumps(asdict(Execution(event, row, completion, os.getpid(), time.time())))
    descriptor = os.open(setup.extras["executions"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def read_executions(path: Path) -> Iterator[Execution]:
    """The recorded events, in order."""
    for line in path.read_text().splitlines():
        yield Execution(**json.loads(line))


def config(folder: Path, rows: int, executions: Path, **fields: Any) -> dict[str, Any]:
    """The configuration of a run of this task; `fields` override its fields."""
    return {
        "rollout": "system.tiny_task:make_rollout_fn",
        "dataset": {"name": "system.tiny_task:rows", "kwargs": {"count": rows}},
        "extras": {"executions": str(executions), "pause": 0.1},
        "base_model": MODEL,
        "lora_rank": 4,
        "backend": "emulator",
        "completions_per_prompt": 4,
        "prompt_groups_per_step": 2,
        "max_head_offpolicy_versions": 1,
        "max_completion_tokens": 4,
        "learning_rate": 0.01,
        "dcp_save_interval": 2,
        "store": str(folder),
    } | fields
