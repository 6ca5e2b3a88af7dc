"""The tiny task with user code that misbehaves as a run's `extras` say.

extras: `late`, rows whose completions take longer, or wait for the file `gate` if it is set;
`flat`, rows without a training signal; `mischief`, what completion 1 of row 2 does on its first
execution, or on each execution if `always` is set.
"""

import asyncio
import math
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from everburn import RecoverableRolloutError, RolloutFn, RolloutRun, RolloutSetup
from everburn.learning.batch import Batch
from support.waiting import until
from system import tiny_task

LATE = 1.5
BLOCKED = 12.0
"""Seconds: longer than the heartbeat timeout of a rollout."""
PATIENCE = 120.0
"""Seconds until a test has opened its gate."""
PLACE = (2, 1)


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    inner = tiny_task.make_rollout_fn(setup)
    mischief = MISCHIEF.get(str(setup.extras.get("mischief")))

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int, evaluation: bool
    ) -> RolloutRun | None:
        if cursor_index in setup.extras.get("late", []):
            await _be_late(setup)
        if mischief and (cursor_index, rollout_idx) == PLACE and not evaluation and _due(setup):
            await mischief()
        run = await inner(sample_prompt, cursor_index, rollout_idx, evaluation)
        if cursor_index in setup.extras.get("flat", []) and not evaluation:
            run = RolloutRun([replace(segment, reward=0.0) for segment in run.segments])
        return run

    return rollout_fn


async def prepare_batch(batch: Batch) -> list[list[list[float]]]:
    """Advantages that need a forward pass: the usual ones times the policy's likelihoods."""
    completions = [completion for group in batch.groups for completion in group.completions]
    tokens = [list(completion.rollout.segments[0].tokens) for completion in completions]
    scores = iter(await batch.logprobs(tokens))

    def weight() -> float:
        return math.exp(sum(next(scores)) / 100)

    return [
        [[completion.advantage * weight()] for completion in group.completions]
        for group in batch.groups
    ]


def loss(data: Any, logprobs: Any, mischief: str, marker: str | None = None) -> Any:
    """A loss function that never returns. marker: a file that records the call."""
    if marker is not None:
        Path(marker).touch()
    if mischief == "exit":
        sys.exit("user code has had enough")
    threading.Event().wait()


async def _be_late(setup: RolloutSetup) -> None:
    gate = setup.extras.get("gate")
    if gate is None:
        await asyncio.sleep(LATE)
        return
    await until(Path(str(gate)).exists, lambda: "for the gate", PATIENCE)


def _due(setup: RolloutSetup) -> bool:
    """Whether the mischief is due: on each execution, or only on the first."""
    done = Path(f"{setup.extras['executions']}.mischief")
    first = not done.exists()
    done.touch()
    return first or bool(setup.extras.get("always"))


async def hang() -> None:
    await asyncio.Event().wait()


async def block() -> None:
    time.sleep(BLOCKED)  # noqa: ASYNC251


async def block_for_ever() -> None:
    threading.Event().wait()


async def raise_in_a_thread() -> None:
    def fail() -> None:
        raise RuntimeError("no caller waits for this thread")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()


async def fail() -> None:
    raise RecoverableRolloutError("the environment isn't there")


async def leave() -> None:
    sys.exit("user code has had enough")


async def crash() -> None:
    os._exit(3)


MISCHIEF: dict[str, Callable[[], Awaitable[None]]] = {
    "hang": hang,
    "block": block,
    "block for ever": block_for_ever,
    "thread": raise_in_a_thread,
    "fail": fail,
    "exit": leave,
    "crash": crash,
}
