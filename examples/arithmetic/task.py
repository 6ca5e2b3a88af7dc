"""Arithmetic with a programmatic grader: sums on the emulator, four-digit products on Fireworks.

The same code serves both; the run's configuration says which operation, and the tokenizer decides
how a problem is put: by the model's chat template where it has one, else as plain text.
"""

import re
from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup

SYMBOLS = {"+": "plus", "*": "times"}


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One problem, one answer, one reward."""

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        prompt = render(setup.tokenizer, sample_prompt)
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        reward, info = grade(sample.text, expected(sample_prompt))
        segment = RolloutSample.of_turn(prompt, sample.tokens, sample.logprobs, reward)
        return RolloutRun([segment], answer=sample.text, info=info)

    return rollout_fn


def render(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """The problem as token ids: a chat turn for a chat model, `47+85=` for a plain one."""
    a, operator, b = row["a"], row["operator"], row["b"]
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{a}{operator}{b}="))
    content = (
        f"What is {a} {operator} {b}? Work it out, then put the final integer on its own line at "
        "the end of your answer."
    )
    return list(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
    )


def expected(row: dict[str, Any]) -> int:
    """The right answer."""
    a, b = int(row["a"]), int(row["b"])
    return a + b if row["operator"] == "+" else a * b


def grade(answer: str, right: int) -> tuple[float, dict[str, Any]]:
    """1 if the last line is the right integer, else 0; and what was read.

    The line must be an optional sign and digits, or digits with well-grouped thousands, and
    nothing else: a number inside a sentence doesn't count.
    """
    lines = answer.strip().splitlines()
    final = lines[-1].strip() if lines else ""
    readable = re.fullmatch(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)", final)
    got = int(final.replace(",", "")) if readable else None
    return float(got == right), {"expected": right, "got": got}
