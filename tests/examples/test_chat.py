"""The examples as a chat model plays them: with the messages, tools and renderer of the Fireworks
configurations. Not with their model or its vocabulary: its special tokens over single bytes, and a
policy whose words are decided here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everburn import RolloutRun
from everburn.rollouts.validation import validate_rollout
from examples.frozen_lake import task as frozen_lake
from examples.frozen_lake.base_model import best_move
from examples.frozen_lake.lake import Map, Walk
from examples.multihop_qa import task as multihop_qa
from support.policies import ScriptedPolicy, qwen3_tokenizer, setup_of

EXAMPLES = Path(__file__).parents[2] / "examples"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens of Qwen3.8 that Qwen3 doesn't have."""


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = qwen3_tokenizer(Path(tmp_path_factory.mktemp("qwen3")))
    tokenizer.add_tokens(list(VISION))
    return tokenizer


def calling(tool: str, **arguments: str) -> str:
    """A tool call as Qwen3.8 writes it."""
    parameters = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items()
    )
    return f"<tool_call>\n<function={tool}>\n{parameters}</function>\n</tool_call><|im_end|>"


async def play(
    example: Any, name: str, tokenizer: Any, answers: list[str], row: dict[str, Any]
) -> tuple[RolloutRun, ScriptedPolicy]:
    """One completion of a row."""
    config = json.loads((EXAMPLES / name / "run.fireworks.json").read_text())
    policy = ScriptedPolicy(tokenizer, answers)
    setup = replace(setup_of(policy, tokenizer), extras=config["extras"])
    run = await example.make_rollout_fn(setup)(row)
    return validate_rollout(run, "here"), policy


def moves_to_the_goal(seed: int) -> list[str]:
    player = Walk(Map.of_seed(seed))
    while not player.at_goal:
        player.move(best_move(player))
    return player.moves


async def test_a_walk_to_the_goal(chat_tokenizer: Any) -> None:
    row = frozen_lake.rows(1)[0]
    moves = moves_to_the_goal(row["seed"])
    answers = [calling("lake_move", direction=move) for move in moves]
    run, policy = await play(frozen_lake, "frozen_lake", chat_tokenizer, answers, row)

    (segment,) = run.segments
    assert segment.reward == 1.0
    assert (run.info["ended"], run.info["moves"]) == ("done", moves)
    first = chat_tokenizer.decode(policy.prompts[0])
    assert "the player P on a frozen lake" in first and '"LEFT"' in first
    assert Walk(Map.of_seed(row["seed"])).view() in first


async def test_a_walk_that_never_arrives_ends_after_twelve_moves(chat_tokenizer: Any) -> None:
    answers = [calling("lake_move", direction="UP")] * 20
    run, policy = await play(
        frozen_lake, "frozen_lake", chat_tokenizer, answers, frozen_lake.rows(1)[0]
    )
    assert run.segments[0].reward == 0.0
    assert len(policy.prompts) == run.info["turns"] == 12


async def test_a_direction_that_isnt_one_moves_nobody(chat_tokenizer: Any) -> None:
    row = frozen_lake.rows(1)[0]
    answers = [calling("lake_move", direction="NORTH"), "I give up.<|im_end|>"]
    run, policy = await play(frozen_lake, "frozen_lake", chat_tokenizer, answers, row)
    assert (run.info["malformed_calls"], run.info["moves"]) == (1, [])
    view = Walk(Map.of_seed(row["seed"])).view()
    assert chat_tokenizer.decode(policy.prompts[1]).count(view) == 2


async def test_a_question_is_searched_twice_and_answered(chat_tokenizer: Any) -> None:
    row = multihop_qa.rows(1, seed=1)[0]
    answers = [
        calling("search", query="anything"),
        calling("search", query=row["context"][0]),
        calling("submit_answer", answer=f"The {row['ground_truth']}."),
    ]
    run, policy = await play(multihop_qa, "multihop_qa", chat_tokenizer, answers, row)

    assert run.segments[0].reward == 1.0
    assert run.info["got"] == f"The {row['ground_truth']}."
    assert len(run.segments[0].turn_starts()) == 3
    assert chat_tokenizer.decode(run.ground_truth_tokens) == row["ground_truth"]
    assert f"- {row['context'][0]}" in chat_tokenizer.decode(policy.prompts[2])


async def test_who_never_answers_gets_nothing(chat_tokenizer: Any) -> None:
    row = multihop_qa.rows(1, seed=1)[0]
    answers = [calling("search", query="Mira")] * 20
    run, policy = await play(multihop_qa, "multihop_qa", chat_tokenizer, answers, row)
    assert (run.segments[0].reward, run.info["got"]) == (0.0, None)
    assert len(policy.prompts) == 8
