"""The learning rate of each optimizer step."""

import math
from typing import Literal


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    kind: Literal["constant", "linear", "cosine"],
    warmup_steps: int = 0,
) -> float:
    """The learning rate of optimizer step `step` (counted from 1).

    Rises linearly to `peak` over `warmup_steps`, then stays (`constant`), falls linearly
    (`linear`) or along half a cosine (`cosine`). The latter two would reach zero one step after
    `total_steps`, so that the last step still trains.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if kind == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps - 1) / span)
    return peak * (1 - progress if kind == "linear" else (1 + math.cos(math.pi * progress)) / 2)
