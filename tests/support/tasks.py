"""The user code of scripted runs."""

import inspect
import threading
from collections.abc import Sequence
from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSetup
from support.script import scripts


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    script = scripts[setup.extras["script"]]

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int, evaluation: bool
    ) -> RolloutRun | None:
        result: RolloutRun | None = await script.perform(
            sample_prompt, cursor_index, rollout_idx, evaluation
        )
        return result

    return rollout_fn


def rows(count: int) -> list[dict[str, Any]]:
    return [{"row": index} for index in range(count)]


async def evaluate(step: int, rollout_fn: RolloutFn, script: str) -> dict[str, float]:
    function = scripts[script].evaluate
    assert function is not None
    values = function(step, rollout_fn)
    result: dict[str, float] = await values if inspect.isawaitable(values) else values
    return result


def prepare(batch: Any, script: str) -> Any:
    function = scripts[script].prepare
    assert function is not None
    return function(batch)


def keep(group: Any, script: str) -> bool:
    function = scripts[script].keep
    assert function is not None
    return function(group)


ended = threading.Event()


def never_returns(rewards: Sequence[float]) -> list[float]:
    """An advantage function that blocks until the test sets `ended`."""
    ended.wait()
    return list(rewards)
