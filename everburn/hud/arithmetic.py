"""The bundled environment: one arithmetic problem, answered by the integer on the last line.

Owns prompts and rewards. `multiply` is put in words, for chat models; `add` as the emulator's base
model knows it, `47+85=`. Doesn't own which problems there are (tasks.py), nor how an answer is read
(everburn/grading.py).
"""

from collections.abc import AsyncGenerator
from typing import Any

from hud.graders import EvaluationResult

from everburn.grading import final_integer
from hud import Environment

NAME = "everburn-arithmetic"


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
    """1 if the last line is the right integer, else 0; `info` says what was read."""
    text = (answer if isinstance(answer, str) else "" if answer is None else str(answer)).strip()
    got = final_integer(text)
    return EvaluationResult(
        reward=float(got == expected), content=text, info={"expected": expected, "got": got}
    )
