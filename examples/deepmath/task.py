r"""DeepMath: problems with a checkable final answer, which the model puts into \boxed{}.

Rows are `{"messages": [...], "ground_truth": "..."}`. The same code serves both backends: a chat
model gets the messages through its template and boxes its answer; the emulator's base model has
neither a template nor a backslash, so it gets the last message's text, and its whole output is the
answer.
"""

import random
from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from examples.arithmetic.sums import held_out_pairs, problem, training_pairs
from examples.deepmath.grading import Grader, UndecidedError, last_boxed

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One problem, one answer; drops a completion that no judge could grade."""
    grader = Grader()
    chats = setup.tokenizer.chat_template is not None

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun | None:
        prompt = render(setup.tokenizer, sample_prompt["messages"])
        sample = await setup.sampler.sample(prompt, **setup.sampling_kwargs)
        answer = last_boxed(sample.text) if chats else sample.text
        try:
            grade = await grader.grade(answer, sample_prompt["ground_truth"])
        except UndecidedError:
            return None
        segment = RolloutSample.of_sample(prompt, sample, grade.reward)
        info = {"truth": sample_prompt["ground_truth"], "read": grade.answer, "by": grade.by}
        return RolloutRun([segment], answer=sample.text, info=info)

    return rollout_fn


def render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """The messages as token ids: through the chat template, or without one the last text."""
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(messages[-1]["content"]))
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def small_rows(count: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Rows for the emulator's base model: sums of two numbers, with truths in several notations, so
    that each judge is needed."""
    pairs = random.Random(1).sample(held_out_pairs() if held_out else training_pairs(), count)
    written = ("{}", "{}.0", r"\text{{{}}}", "${}$")
    return [
        {
            "messages": [{"role": "user", "content": problem((a, b))}],
            "ground_truth": written[index % len(written)].format(a + b),
        }
        for index, (a, b) in enumerate(pairs)
    ]


def deepmath_rows(source: str, count: int, skip: int = 0) -> list[dict[str, Any]]:
    """Rows of a .parquet or .jsonl file with the DeepMath data set's columns `question` and
    `final_answer`."""
    from everburn.rollouts.dataset import load_rows

    rows = load_rows(source)[skip : skip + count]
    return [
        {
            "messages": [{"role": "user", "content": f"{row['question']}\n\n{INSTRUCTION}"}],
            "ground_truth": str(row["final_answer"]),
        }
        for row in rows
    ]
