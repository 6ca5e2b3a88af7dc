"""The policy calls the tools of an environment."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hud.agents.base import Agent

from everburn.agentic import Limits, Reply, TextFormat, ToolCall
from everburn.hud.rollouts import make_rollout_fn
from everburn.hud.tool_agent import ToolAgent
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.rollouts.contract import RolloutRun, RolloutSetup
from everburn.rollouts.sampling import CompletionScope, current_scope
from support.agents import CHARACTERS, render
from support.hud_runs import Runs
from support.policies import ScriptedPolicy, qwen3_tokenizer, setup_of

CARDS = str(Path(__file__).parent / "cards" / "env.py")


def a_task(card: str = "ace", place: str = "b2") -> dict[str, Any]:
    return {"env": "cards", "id": "find", "args": {"card": card, "place": place}}


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = qwen3_tokenizer(Path(tmp_path_factory.mktemp("qwen3")))
    tokenizer.chat_template = "there is one"
    return tokenizer


def look(place: object) -> str:
    arguments = json.dumps({"name": "look", "arguments": {"place": place}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


async def play(
    tokenizer: Any, answers: list[str], turns: int = 6
) -> tuple[RolloutRun, ScriptedPolicy]:
    """A rollout of a policy with scripted answers."""
    policy = ScriptedPolicy(tokenizer, [f"{answer}<|im_end|>" for answer in answers])
    rollout_fn = make_rollout_fn(
        setup_of(policy, tokenizer),
        env_path=CARDS,
        renderer="qwen3_disable_thinking",
        turns=turns,
    )
    current_scope.set(CompletionScope("a test", 0))
    run = await rollout_fn(a_task())
    assert isinstance(run, RolloutRun)
    return run, policy


async def test_an_environments_tools_are_called(chat_tokenizer: Any) -> None:
    run, policy = await play(chat_tokenizer, [look("a1"), look("b2"), "b2"])
    (segment,) = run.segments
    assert segment.reward == pytest.approx(0.9)
    assert (run.answer, run.info["looked"]) == ("b2", ["a1", "b2"])
    trained = [t for t, m in zip(segment.tokens, segment.loss_mask, strict=True) if m]
    assert trained == [token for output in policy.outputs for token in output]

    first, *_, last = map(chat_tokenizer.decode, policy.prompts)
    assert '"name": "look"' in first and "Look at the card in a place." in first
    assert '"required": ["place"]' in first and "where is ace?" in first
    assert "there is no card in a1" in last and "<tool_response>\nace\n</tool_response>" in last


async def test_the_trace_has_every_turn_and_the_tool_results(chat_tokenizer: Any) -> None:
    run, _ = await play(chat_tokenizer, [look("b2"), "b2"])
    _, _, request, response, answer, _ = run.info["hud"]["steps"]
    assert [call["name"] for call in request["tool_calls"]] == ["look"]
    assert request["tool_calls"][0]["arguments"] == {"place": "b2"}
    assert response["call"]["id"] == request["tool_calls"][0]["id"]
    assert [block["text"] for block in response["result"]["content"]] == ["ace"]
    assert answer["content"] == "b2"


async def test_the_policy_sees_a_call_that_the_environment_refuses(
    chat_tokenizer: Any,
) -> None:
    run, policy = await play(chat_tokenizer, [look({"row": 3}), "no idea"])
    assert run.segments[0].reward == 0.0 and run.info["looked"] == []
    assert "valid string" in chat_tokenizer.decode(policy.prompts[1])


async def test_the_limit_of_turns_ends_an_episode(chat_tokenizer: Any) -> None:
    run, policy = await play(chat_tokenizer, [look("b2")] * 3, turns=2)
    assert len(policy.prompts) == 2 and run.info["looked"] == ["b2", "b2"]


def looker(setup: RolloutSetup) -> Agent:
    """Treats any text of the tiny model as the place of a card to look at."""

    def parse(text: str) -> Reply:
        return Reply(text, (ToolCall("look", {"place": text}, text),))

    format = TextFormat(setup.tokenizer, render, parse, stop=CHARACTERS)
    return ToolAgent(setup, format, Limits(turns=3))


async def test_environments_with_tools_run_concurrently(runs: Runs) -> None:
    """Each has its own MCP server; exactly the sampled tokens are trained."""
    runner = await runs.runner([a_task()], env_path=CARDS, agent=f"{__name__}:looker")
    group = GroupKey(cursor=0)
    await asyncio.gather(*(runner.complete(group, number, 0) for number in range(8)))
    for number in range(8):
        record, run = read_rollout(runner.store, rollout_key(group, number))
        (segment,) = run.segments
        assert len(record.versions) == 3 == len(run.info["looked"])
        assert record.output_tokens == sum(segment.loss_mask)
        assert run.info["hud"]["boundaries"]["appends"] == 2
