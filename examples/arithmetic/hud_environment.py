"""The HUD environment of this example: a problem whose answer is the integer on the last line.

Owns problems, prompts and rewards: `multiply` is worded for chat models, `add` for the emulator's
base model (`47+85=`). Doesn't own the parsing of answers (grading.py).
"""

import random
from collections.abc import AsyncGenerator
from typing import Any, Literal

from hud.eval import Taskset
from hud.graders import EvaluationResult

from everburn.rollouts.dataset import DatasetError
from examples.arithmetic.grading import final_integer
from hud import Environment

NAME = "everburn-arithmetic"

Range = tuple[int, int]


def tasks(
    count: int, seed: int, *, template: Literal["multiply", "add"], a: Range, b: Range
) -> Taskset:
    """`count` unique pairs of operands from two inclusive ranges, drawn without replacement.

    Raises:
        DatasetError: the ranges hold too few pairs.
    """
    make = environment().templates[template]
    a_count, b_count = (high - low + 1 for low, high in (a, b))
    pairs = a_count * b_count
    if count > pairs:
        raise DatasetError(
            f"{count} arithmetic tasks are needed, but the operand ranges hold only "
            f"{pairs} unique pairs: widen them, or use fewer tasks"
        )
    chosen = random.Random(seed).sample(range(pairs), count)
    return Taskset(
        f"arithmetic-{seed}",
        [make(a=a[0] + index // b_count, b=b[0] + index % b_count) for index in chosen],
    )


def environment() -> Environment:
    """A new environment: one instance serves one task at a time."""
    env = Environment(name=NAME)

    @env.template()
    async def multiply(a: int, b: int) -> AsyncGenerator[Any, Any]:
        answer = yield (
            f"What is {a} * {b}? Work it out, then put the final integer on its own line at the "
            "end of your answer."
        )
        yield grade_final_integer(answer, a * b)

    @env.template()
    async def add(a: int, b: int) -> AsyncGenerator[Any, Any]:
        answer = yield f"{a}+{b}="
        yield grade_final_integer(answer, a + b)

    return env


def grade_final_integer(answer: object, expected: int) -> EvaluationResult:
    """Reward 1 if the last line is the right integer, else 0; `info` has the parsed integer."""
    text = (answer if isinstance(answer, str) else "" if answer is None else str(answer)).strip()
    got = final_integer(text)
    return EvaluationResult(
        reward=float(got == expected), content=text, info={"expected": expected, "got": got}
    )
