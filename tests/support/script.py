"""Scripts: what the rollouts and the trainer of one run do, decided by its test."""

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

    retry: earlier calls for the same completion. version: the policy it would sample from.
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
"""What a draw comes to: a reward, or whatever a rollout function may return or raise. Runs on the
rollout worker's user loop."""


async def spread(draw: Draw) -> float:
    """Completions of a row get different rewards: there is something to learn from each."""
    return float(draw.completion)


def behind(gates: Mapping[int, Gate]) -> Play:
    """As `spread`; completions of these rows wait at their gate before."""

    async def play(draw: Draw) -> float:
        if draw.row in gates:
            await gates[draw.row].passed()
        return await spread(draw)

    return play


@dataclass
class Script:
    """Found by its run's id, from the rollout function and from the trainer worker."""

    play: Play = spread
    trainer: ScriptedTrainer = field(default_factory=ScriptedTrainer)
    evaluate: Callable[..., Any] | None = None
    """The run's evaluation function, where it has one."""
    keep: Callable[..., bool] | None = None
    """The run's dynamic filter, where it has one."""
    prepare: Callable[..., Any] | None = None
    """The run's `prepare_batch`, where it has one."""
    begun: list[Draw] = field(default_factory=list)
    ended: list[Draw] = field(default_factory=list)
    """With a result or an error."""
    cancelled: list[Draw] = field(default_factory=list)

    @property
    def rows_begun(self) -> set[int]:
        """Rows that training draws were made of."""
        return {draw.row for draw in self.begun if not draw.evaluation}

    def draws(self, row: int, completion: int | None = None) -> list[Draw]:
        """The training draws begun of a row, or of one of its completions."""
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
    """The smallest rollout there is."""
    sample = RolloutSample(
        tokens=[1, 2, 3], logprobs=[0.0, -1.0, -1.0], loss_mask=[0, 1, 1], reward=reward
    )
    return RolloutRun([sample])


scripts: dict[str, Script] = {}
"""By run id."""
