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

    Warm-up rises linearly to `peak` over `warmup_steps`. After it `constant` stays, `linear`
    falls in equal parts, `cosine` along half a cosine; the latter two would reach zero one step
    after `total_steps`, so that the last step still trains.
    """
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if kind == "constant":
        return peak
    span = max(1, total_steps - warmup_steps)
    done = min(1.0, (step - warmup_steps - 1) / span)
    return peak * (1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2)
