"""Multi-hop questions: search twice, then answer.

The same code serves both backends: on Fireworks `extras.renderer` names the chat model's format;
the emulator's small model speaks plain text, one call per line.
"""

import random
from collections.abc import Sequence
from typing import Any

from everburn import RolloutFn, RolloutRun, RolloutSetup
from everburn.agentic import (
    Format,
    Limits,
    Message,
    RendererFormat,
    Reply,
    TextFormat,
    ToolCall,
    ToolResult,
    run_tool_loop,
)
from examples.multihop_qa.grading import token_f1
from examples.multihop_qa.search import Search
from examples.multihop_qa.world import row

TURNS = 8
ARGUMENTS = {"search": "query", "submit_answer": "answer"}
NOTHING_FOUND = "-"


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One question, at most 8 turns; the reward is the F1 of the submitted answer."""
    chat = "renderer" in setup.extras
    format = make_format(setup)
    instructions: list[Message] = setup.extras.get("instructions", [])

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        paragraphs, truth = Search(sample_prompt["context"]), sample_prompt["ground_truth"]
        submitted: list[str] = []

        async def search(query: str) -> str:
            """Search the paragraphs; answers with the two that fit best."""
            return results(paragraphs, query)

        async def submit_answer(answer: str) -> ToolResult:
            """Submit the final answer, as short as possible."""
            submitted.append(answer)
            return ToolResult("", done=True)

        episode = await run_tool_loop(
            setup,
            format,
            [*instructions, *sample_prompt["messages"]],
            [search, submit_answer],
            Limits(turns=TURNS),
            on_malformed=lambda call: NOTHING_FOUND,
        )
        reward = token_f1(submitted[0], truth) if submitted else 0.0
        info = {"expected": truth, "got": submitted[0] if submitted else None}
        run = episode.run(reward, info)
        # Information gain is measured on the answer in the policy's own format.
        said = truth if chat else call_text("submit_answer", truth)
        run.ground_truth_tokens = setup.tokenizer.encode(said, add_special_tokens=False)
        return run

    return rollout_fn


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions, each about its own world; deterministic for a seed."""
    rng = random.Random(seed)
    return [row(rng) for _ in range(count)]


def results(paragraphs: Search, query: str) -> str:
    """The search tool's result, one line per paragraph."""
    return "\n".join(f"- {found}" for found in paragraphs.top(query)) or NOTHING_FOUND


def make_format(setup: RolloutSetup) -> Format:
    if "renderer" in setup.extras:
        return RendererFormat(setup.tokenizer, setup.extras["renderer"])
    return TextFormat(setup.tokenizer, render, parse)


def render(messages: Sequence[Message]) -> str:
    """Plain text: every message ends with a line break."""
    return "".join(f"{message['content']}\n" for message in messages)


def call_text(name: str, argument: str) -> str:
    """A call in plain text, including its end: `search: teacher Mira`."""
    return f"{name}: {argument}\n"


def parse(text: str) -> Reply:
    """Parse a call in plain text; any other text is an invalid call."""
    name, _, argument = text.strip().partition(": ")
    if name not in ARGUMENTS or not argument:
        return Reply("", (ToolCall(None, None, text, "it is no call"),))
    return Reply("", (ToolCall(name, {ARGUMENTS[name]: argument}, text),))
