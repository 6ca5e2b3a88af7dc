"""Arithmetic with a programmatic grader: sums on the emulator, four-digit products on Fireworks.

The same code serves both: the rows name the operation, and the tokenizer determines the prompt: the
model's chat template if it has one, else plain text.
"""

import random
from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from examples.arithmetic.grading import final_integer
from examples.arithmetic.sums import held_out_pairs, training_pairs


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One problem, one answer, one reward."""

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        prompt = render(setup.tokenizer, sample_prompt)
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        reward, info = grade_final_integer(sample.text, expected(sample_prompt))
        segment = RolloutSample.of_sample(prompt, sample, reward)
        return RolloutRun([segment], answer=sample.text, info=info)

    return rollout_fn


def sums(count: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Two-digit sums; the base model's demonstrations contain no held-out ones."""
    pairs = held_out_pairs() if held_out else training_pairs()
    chosen = random.Random(0).sample(pairs, count)
    return [{"a": a, "operator": "+", "b": b} for a, b in chosen]


def products(count: int, skip: int = 0, seed: int = 0) -> list[dict[str, Any]]:
    """Unique products of four-digit numbers, without the first `skip`, which another set has."""
    numbers = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < skip + count:
        pairs[numbers.randint(1000, 9999), numbers.randint(1000, 9999)] = None
    return [{"a": a, "operator": "*", "b": b} for a, b in list(pairs)[skip:]]


def render(tokenizer: Any, row: dict[str, Any]) -> list[int]:
    """The problem as token ids: a chat turn for a chat model, `47+85=` for a plain model."""
    a, operator, b = row["a"], row["operator"], row["b"]
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(f"{a}{operator}{b}="))
    content = (
        f"What is {a} {operator} {b}? Work it out, then put the final integer on its own line at "
        "the end of your answer."
    )
    chat = [{"role": "user", "content": content}]
    return list(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
    )


def expected(row: dict[str, Any]) -> int:
    """The right answer."""
    a, b = int(row["a"]), int(row["b"])
    return a + b if row["operator"] == "+" else a * b


def grade_final_integer(answer: str, right: int) -> tuple[float, dict[str, Any]]:
    """Reward 1 if the last line is the right integer, else 0; and the parsed integer."""
    got = final_integer(answer)
    return float(got == right), {"expected": right, "got": got}
