"""Frozen lake: walk to the goal with a tool, one move per turn.

The same code serves both backends: on Fireworks `extras.renderer` names the chat model's format;
the emulator's small model speaks plain text, four rows and a move.
"""

from collections.abc import Sequence
from itertools import count as numbers
from itertools import islice
from typing import Any, Literal

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
from examples.frozen_lake.lake import MOVES, Map, Walk

STEPS = 12


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """One map, at most 12 moves; reward 1 for reaching the goal."""
    format = make_format(setup)
    instructions: list[Message] = setup.extras.get("instructions", [])

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        walk = Walk(Map.of_seed(sample_prompt["seed"]))

        async def lake_move(direction: Literal["LEFT", "DOWN", "RIGHT", "UP"]) -> ToolResult:
            """Move one cell over the ice; answers with the map after the move."""
            walk.move(direction)
            return ToolResult(walk.view(), done=walk.is_over or len(walk.moves) == STEPS)

        episode = await run_tool_loop(
            setup,
            format,
            [*instructions, {"role": "user", "content": walk.view()}],
            [lake_move],
            Limits(turns=STEPS),
            on_malformed=lambda call: walk.view(),
        )
        return episode.run(float(walk.at_goal), {"moves": walk.moves})

    return rollout_fn


def rows(count: int, held_out: bool = False) -> list[dict[str, Any]]:
    """Seeds; maps of held-out seeds never occur in training."""
    seeds = (seed for seed in numbers() if Map.of_seed(seed).is_held_out == held_out)
    return [{"seed": seed} for seed in islice(seeds, count)]


def make_format(setup: RolloutSetup) -> Format:
    if "renderer" in setup.extras:
        return RendererFormat(setup.tokenizer, setup.extras["renderer"])
    return TextFormat(setup.tokenizer, render, parse)


def render(messages: Sequence[Message]) -> str:
    """Plain text: `PFHF/FFFH/HFFF/FFFG/` for a map, one line per move."""
    return "".join(
        f"{message['content']}\n"
        if message["role"] == "assistant"
        else "".join(f"{row}/" for row in message["content"].splitlines())
        for message in messages
    )


def parse(text: str) -> Reply:
    """A move is a tool call; any other text is an invalid call."""
    problem = None if text in MOVES else "it names no direction"
    return Reply("", (ToolCall("lake_move", {"direction": text}, text, problem),))
