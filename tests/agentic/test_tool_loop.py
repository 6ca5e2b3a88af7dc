"""The tool loop: turns, limits, malformed and failing calls."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from everburn import RecoverableRolloutError, RolloutRun
from everburn.agentic.assembly import TraceIntegrityError
from everburn.agentic.formats import Format, RendererFormat, TextFormat
from everburn.agentic.messages import Message, Reply, ToolCall
from everburn.agentic.tool_loop import Episode, Limits, run_tool_loop
from everburn.agentic.tools import ToolResult
from everburn.rollouts.contract import PromptTooLongError
from everburn.rollouts.validation import validate_rollout
from support.policies import ScriptedPolicy, setup_of

ASK = [{"role": "user", "content": "go"}]


class Counter:
    """An environment whose state its tools change."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, number: int) -> str | ToolResult:
        """Add a number; a count of ten ends the episode."""
        self.count += number
        return ToolResult(f"{self.count}", done=self.count >= 10)


def chat(tokenizer: Any) -> Format:
    return RendererFormat(tokenizer, {"name": "qwen3", "enable_thinking": False})


def calling(number: object, name: str = "add") -> str:
    arguments = f'{{"number": {number}}}'
    call = f'{{"name":  "{name}", "arguments": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


async def play(
    tokenizer: Any, answers: Sequence[str], environment: Counter | None = None, **settings: Any
) -> tuple[Episode, ScriptedPolicy]:
    policy = ScriptedPolicy(tokenizer, answers, settings.pop("context", None))
    tools = [(environment or Counter()).add, *settings.pop("more_tools", [])]
    episode = await run_tool_loop(
        setup_of(policy, tokenizer), chat(tokenizer), ASK, tools, **settings
    )
    return episode, policy


def trained(run: RolloutRun) -> list[tuple[int, float]]:
    return [
        (token, logprob)
        for segment in run.segments
        for token, logprob, flag in zip(
            segment.tokens, segment.logprobs, segment.loss_mask, strict=True
        )
        if flag
    ]


async def test_an_episode_of_several_turns_is_one_segment_of_exact_tokens(
    chat_tokenizer: Any,
) -> None:
    environment = Counter()
    answers = [calling(3), calling(4), "that's seven<|im_end|>"]
    episode, policy = await play(chat_tokenizer, answers, environment)
    run = validate_rollout(episode.run(1.0, {"mine": 1}), "here")

    assert environment.count == 7 and episode.ended == "reply"
    (segment,) = run.segments
    assert segment.tokens == policy.prompts[-1] + policy.outputs[-1]
    assert trained(run) == [
        (token, -(turn + 1 + k / 1000))
        for turn, output in enumerate(policy.outputs)
        for k, token in enumerate(output)
    ]
    assert run.answer == "that's seven"
    assert run.info["turns"] == 3 and run.info["tool_calls"] == 2 and run.info["mine"] == 1
    assert run.info["boundaries"]["appends"] == 2
    roles = [message["role"] for message in episode.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [m["tool_call_id"] for m in episode.messages if m["role"] == "tool"] == [
        "call_0",
        "call_1",
    ]


async def test_a_tool_can_end_the_episode(chat_tokenizer: Any) -> None:
    two = calling(5).replace("<|im_end|>", "") + calling(7) + calling(1)
    environment = Counter()
    episode, policy = await play(chat_tokenizer, [two], environment)

    assert (episode.ended, environment.count, episode.tool_calls) == ("done", 12, 2)
    assert episode.run(1.0).answer is None, "the sampled text is shown instead"
    assert len(policy.prompts) == 1


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (calling('"x"'), "number: Input should be a valid integer"),
        (calling(1, name="subtract"), "there is no such tool; available: add"),
        ("<tool_call>\n{nonsense\n</tool_call><|im_end|>", "aren't valid JSON"),
    ],
)
async def test_malformed_calls_are_answered_and_counted(
    chat_tokenizer: Any, call: str, complaint: str
) -> None:
    episode, _ = await play(chat_tokenizer, [call, "sorry<|im_end|>"])
    assert complaint in episode.messages[2]["content"]
    assert (episode.malformed, episode.tool_calls, episode.ended) == (1, 0, "reply")


async def test_the_environment_can_answer_malformed_calls(chat_tokenizer: Any) -> None:
    def end(call: ToolCall) -> ToolResult:
        return ToolResult(f"no: {call.problem}", done=True)

    episode, _ = await play(chat_tokenizer, [calling(1, name="fly")], on_malformed=end)
    assert (episode.ended, episode.malformed) == ("done", 1)


async def test_failing_tools_are_answered_and_counted(chat_tokenizer: Any) -> None:
    def broken(number: int) -> str:
        raise OSError("disk on fire")

    answers = [calling(1, name="broken"), "sorry<|im_end|>"]
    episode, _ = await play(chat_tokenizer, answers, more_tools=[broken])
    assert episode.messages[2]["content"] == "Error: broken failed: OSError: disk on fire"
    assert (episode.failed, episode.tool_calls, episode.malformed) == (1, 1, 0)

    async def answer(call: ToolCall, error: Exception) -> str:
        return f"{call.name}? {error}"

    episode, _ = await play(chat_tokenizer, answers, more_tools=[broken], on_failure=answer)
    assert episode.messages[2]["content"] == "broken? disk on fire"


async def test_a_recoverable_error_of_a_tool_is_raised_not_answered(chat_tokenizer: Any) -> None:
    def offline(number: int) -> str:
        raise RecoverableRolloutError("the search service is down")

    with pytest.raises(RecoverableRolloutError, match="search service"):
        await play(chat_tokenizer, [calling(1, name="offline")], more_tools=[offline])


async def test_a_slow_tool_counts_as_failed(chat_tokenizer: Any) -> None:
    never = threading.Event()

    def slow(number: int) -> str:
        never.wait(30)
        return "late"

    answers = [calling(1, name="slow"), "well<|im_end|>"]
    limits = Limits(tool_seconds=0.05)
    try:
        episode, _ = await play(chat_tokenizer, answers, more_tools=[slow], limits=limits)
    finally:
        never.set()
    assert "TimeoutError: no result within 0.05 s" in episode.messages[2]["content"]
    assert (episode.failed, episode.ended) == (1, "reply")


async def test_turns_are_limited(chat_tokenizer: Any) -> None:
    episode, policy = await play(chat_tokenizer, [calling(1)] * 9, limits=Limits(turns=2))
    assert (episode.ended, len(policy.prompts), episode.tool_calls) == ("turns", 2, 2)


async def test_tokens_of_all_turns_are_limited(chat_tokenizer: Any) -> None:
    one = len(chat_tokenizer.encode(calling(1)))
    episode, policy = await play(
        chat_tokenizer, [calling(1)] * 9, limits=Limits(tokens=one + one // 2)
    )
    assert (episode.ended, episode.tool_calls) == ("tokens", 1)
    assert [s["max_tokens"] for s in policy.settings] == [one + one // 2, one // 2]
    assert episode.sampled_tokens == one + one // 2
    assert episode.calls[-1].truncated

    episode, policy = await play(chat_tokenizer, [calling(1)] * 9, limits=Limits(tokens=one))
    assert (episode.ended, len(policy.prompts)) == ("tokens", 1)


async def test_seconds_are_limited_and_sampled_tokens_are_kept(chat_tokenizer: Any) -> None:
    async def stuck(number: int) -> str:
        await asyncio.Event().wait()
        return ""

    episode, _ = await play(
        chat_tokenizer, [calling(1, name="stuck")], more_tools=[stuck], limits=Limits(seconds=0.2)
    )
    assert episode.ended == "seconds"
    assert len(episode.run(0.0).segments) == 1


async def test_an_episode_without_samples_is_no_rollout(chat_tokenizer: Any) -> None:
    policy = ScriptedPolicy(chat_tokenizer, [""])
    episode = await run_tool_loop(setup_of(policy, chat_tokenizer), chat(chat_tokenizer), ASK)
    with pytest.raises(RecoverableRolloutError, match="nothing was sampled"):
        episode.run(0.0)


async def test_a_truncated_answer_ends_the_episode_and_runs_no_tool(
    chat_tokenizer: Any,
) -> None:
    environment = Counter()
    two = calling(1).replace("<|im_end|>", "") + calling(2)
    settings = {"max_tokens": len(chat_tokenizer.encode(two)) - 1}
    episode, _ = await play(chat_tokenizer, [two], environment, sampling=settings)

    assert (episode.ended, environment.count) == ("truncated", 0)
    assert episode.run(0.0).info["boundaries"]["truncated"] == 1


async def test_a_full_context_ends_the_episode_and_is_an_error_at_the_first_prompt(
    chat_tokenizer: Any,
) -> None:
    _, policy = await play(chat_tokenizer, ["hello<|im_end|>"])
    first = len(policy.prompts[0])
    episode, _ = await play(chat_tokenizer, [calling(1)] * 9, context=first)
    assert (episode.ended, len(episode.calls)) == ("context", 1)

    with pytest.raises(PromptTooLongError):
        await play(chat_tokenizer, [calling(1)], context=first - 1)


async def test_the_environment_can_answer_a_reply_without_tool_calls(chat_tokenizer: Any) -> None:
    def insist(reply: Reply) -> str | None:
        return None if "7" in reply.content else "guess again"

    episode, _ = await play(
        chat_tokenizer, ["6<|im_end|>", "8<|im_end|>", "7<|im_end|>"], on_reply=insist
    )
    assert [m["content"] for m in episode.messages] == [
        *("go", "6", "guess again", "8", "guess again", "7")
    ]
    assert len(episode.run(1.0).segments) == 1


async def test_a_conversation_that_is_rendered_again_splits_or_is_rejected(
    chat_tokenizer: Any,
) -> None:
    """Qwen3's template with thinking drops old thoughts after the next user message."""
    policy = ScriptedPolicy(chat_tokenizer, ["<think>\n6?\n</think>\n\n6<|im_end|>"] * 2)
    episode = await run_tool_loop(
        setup_of(policy, chat_tokenizer),
        RendererFormat(chat_tokenizer, {"name": "qwen3"}),
        ASK,
        limits=Limits(turns=2),
        on_reply=lambda reply: "guess again",
    )
    run = episode.run(0.0)
    assert run.info["boundaries"]["splits"] == 1
    assert [token for token, _ in trained(run)] == policy.outputs[0] + policy.outputs[1]
    with pytest.raises(TraceIntegrityError):
        episode.run(0.0, on_branch="reject")


async def test_plain_text_needs_no_chat_template(plain_tokenizer: Any) -> None:
    def render(messages: Sequence[Message]) -> str:
        return "".join(f"{message['content']}?" for message in messages)

    def parse(text: str) -> Reply:
        if not text.isdigit():
            return Reply(text, (ToolCall(None, None, text, "that isn't a number"),))
        return Reply(text, (ToolCall("add", {"number": int(text)}, text),))

    environment = Counter()
    policy = ScriptedPolicy(plain_tokenizer, ["4\n", "x\n", "9\n"])
    episode = await run_tool_loop(
        setup_of(policy, plain_tokenizer),
        TextFormat(plain_tokenizer, render, parse),
        ASK,
        [environment.add],
        on_malformed=lambda call: "a number",
    )
    run = episode.run(1.0)
    (segment,) = run.segments
    assert run.answer == "9"
    assert plain_tokenizer.decode(segment.tokens) == "go?4\n4?x\na number?9\n"
    assert (episode.ended, environment.count, episode.malformed) == ("done", 13, 1)


def test_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"Limits\.turns is 0"):
        Limits(turns=0)
