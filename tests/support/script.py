"""Scripts: a test's definition of what the rollouts and the trainer of one run do."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everburn import RolloutRun, RolloutSample
from everburn.rollouts.sampling import current_scope
from support.trainer import ScriptedTrainer
from support.waiting import Gate


@dataclass(frozen=True)
class Draw:
    """One call of the rollout function.

    retry: number of earlier calls for the completion. version: of the policy to sample from.
    """

    row: int
    completion: int
    evaluation: bool
    retry: int
    version: int
    prompt: dict[str, Any]

    @property
    def place(self) -> tuple[int, int]:
        return self.row, self.completion


Play = Callable[[Draw], Awaitable[Any]]
"""Returns the result of a draw: a reward, or anything that a rollout function may return or raise.
Runs on the rollout worker's user loop."""


async def spread(draw: Draw) -> float:
    """Different rewards for the completions of a row, so that each has a training signal."""
    return float(draw.completion)


def behind(gates: Mapping[int, Gate]) -> Play:
    """Like `spread`, but completions of these rows first wait at their gate."""

    async def play(draw: Draw) -> float:
        if draw.row in gates:
            await gates[draw.row].passed()
        return await spread(draw)

    return play


@dataclass
class Script:
    """Rollout function and trainer worker find it by the run's id."""

    play: Play = spread
    trainer: ScriptedTrainer = field(default_factory=ScriptedTrainer)
    evaluate: Callable[..., Any] | None = None
    """The run's evaluation function, if any."""
    keep: Callable[..., bool] | None = None
    """The run's dynamic filter, if any."""
    prepare: Callable[..., Any] | None = None
    """The run's `prepare_batch`, if any."""
    begun: list[Draw] = field(default_factory=list)
    ended: list[Draw] = field(default_factory=list)
    """Draws that ended with a result or an error."""
    cancelled: list[Draw] = field(default_factory=list)

    @property
    def rows_begun(self) -> set[int]:
        """Rows with training draws."""
        return {draw.row for draw in self.begun if not draw.evaluation}

    def draws(self, row: int, completion: int | None = None) -> list[Draw]:
        """The training draws of a row, or of one of its completions."""
        return [
            draw
            for draw in self.begun
            if draw.row == row and completion in (None, draw.completion) and not draw.evaluation
        ]

    async def perform(self, row: dict[str, Any], cursor: int, index: int, evaluation: bool) -> Any:
        """One call of the rollout function."""
        retry = sum(d.place == (cursor, index) and d.evaluation == evaluation for d in self.begun)
        version = current_scope.get().version
        draw = Draw(cursor, index, evaluation, retry, version, row)
        self.begun.append(draw)
        try:
            result = await self.play(draw)
        except asyncio.CancelledError:
            self.cancelled.append(draw)
            raise
        except Exception:
            self.ended.append(draw)
            raise
        self.ended.append(draw)
        return one_segment(result) if isinstance(result, float | int) else result


def one_segment(reward: float) -> RolloutRun:
    """The smallest possible rollout."""
    sample = RolloutSample(
        tokens=[1, 2, 3], logprobs=[0.0, -1.0, -1.0], loss_mask=[0, 1, 1], reward=reward
    )
    return RolloutRun([sample])


scripts: dict[str, Script] = {}
"""The scripts by run id."""
