"""The tiny task, where each completion also starts a HUD environment in its own process."""

import os
from pathlib import Path
from typing import Any

from hud.eval import Task

from everburn import RolloutFn, RolloutRun, RolloutSetup
from everburn.hud.environments import place
from system import tiny_task


def log_attempt(log: Path) -> None:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """extras: `environment`, the file that declares the environment `counting`."""
    inner = tiny_task.make_rollout_fn(setup)
    placement = place(setup.sandboxes, env_path=setup.extras["environment"], isolation="process")
    task = Task(env="counting", id="variety", args={"start": "ab"})
    log = Path(setup.extras["environment"]).parent / "made"

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int, evaluation: bool
    ) -> RolloutRun:
        async with placement(task):
            log_attempt(log)
            run: RolloutRun = await inner(sample_prompt, cursor_index, rollout_idx, evaluation)
            return run

    return rollout_fn
