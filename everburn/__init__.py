"""Durable asynchronous reinforcement learning for language models.

What user code imports: the rollout contract. Everything else is reached through the command line
(`everburn`) and a run's configuration (`everburn.config.RunConfig`).
"""

from everburn.rollouts.contract import (
    InvalidRolloutError,
    PromptTooLongError,
    RecoverableRolloutError,
    RolloutFn,
    RolloutRun,
    RolloutSample,
    RolloutSetup,
)

__all__ = [
    "InvalidRolloutError",
    "PromptTooLongError",
    "RecoverableRolloutError",
    "RolloutFn",
    "RolloutRun",
    "RolloutSample",
    "RolloutSetup",
]
