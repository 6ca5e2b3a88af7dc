"""Formats: messages to tokens and back, and extension of exactly the sampled tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
from renderers import Qwen3RendererConfig

from everburn.agentic.formats import FormatError, RendererFormat, TextFormat
from everburn.agentic.messages import Message, Reply, ToolCall
from everburn.agentic.tools import Tool

QWEN3 = {"name": "qwen3", "enable_thinking": False}
ASK = [{"role": "user", "content": "how warm is it?"}]
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "20"}


def warmth(city: str) -> str:
    """Degrees in a city."""
    return "20"


SPECS = [Tool.of(warmth).spec]


def sampled(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_rendered_conversation_ends_with_the_generation_prompt(chat_tokenizer: Any) -> None:
    text = chat_tokenizer.decode(RendererFormat(chat_tokenizer, QWEN3).render(ASK, SPECS))
    assert '"name": "warmth"' in text and '"type": "function"' in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_next_prompt_begins_with_exactly_the_sampled_tokens(chat_tokenizer: Any) -> None:
    format = RendererFormat(chat_tokenizer, QWEN3)
    prompt = format.render(ASK, SPECS)
    # Spaces that no template writes: rendering again would lose them.
    output = sampled(
        chat_tokenizer,
        '<tool_call>\n{"name":   "warmth", "arguments":{"city":"Bonn"}}\n</tool_call><|im_end|>',
    )
    reply = format.parse(prompt, output, SPECS)
    following = format.extend(prompt, output, [RESULT], SPECS)

    (call,) = reply.tool_calls
    assert (call.name, call.arguments, call.problem) == ("warmth", {"city": "Bonn"}, None)
    assert following is not None and following[: len(prompt + output)] == prompt + output
    added = chat_tokenizer.decode(following[len(prompt + output) :])
    assert "<tool_response>\n20\n</tool_response>" in added


def test_a_truncated_answer_is_closed_in_the_next_prompt(chat_tokenizer: Any) -> None:
    format = RendererFormat(chat_tokenizer, QWEN3)
    prompt, output = format.render(ASK), sampled(chat_tokenizer, "it is")
    following = format.extend(prompt, output, [{"role": "user", "content": "go on"}])

    assert following is not None and following[: len(prompt + output)] == prompt + output
    assert chat_tokenizer.decode(following[len(prompt + output) :]).startswith("<|im_end|>\n")


def test_thoughts_that_the_template_drops_prevent_extension(chat_tokenizer: Any) -> None:
    """With thinking, Qwen3's template drops old thoughts after the next user message."""
    output = sampled(chat_tokenizer, "<think>\nhm\n</think>\n\nno<|im_end|>")
    new = [{"role": "user", "content": "sure?"}]
    drops = RendererFormat(chat_tokenizer, Qwen3RendererConfig())
    retains = RendererFormat(chat_tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    prompt = drops.render(ASK)

    assert drops.parse(prompt, output).reasoning is not None
    assert drops.extend(prompt, output, new) is None
    assert retains.extend(prompt, output, new) is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<tool_call>\n{"name": "warmth", "argu\n</tool_call>', "aren't valid JSON"),
        ('<tool_call>\n{"name": "warmth", "arguments": {', "isn't closed"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', "names no tool"),
        ('<tool_call>\n{"name": "warmth", "arguments": [1]}\n</tool_call>', "aren't a JSON object"),
    ],
)
def test_a_malformed_call_is_parsed_as_a_problem(
    chat_tokenizer: Any, text: str, problem: str
) -> None:
    format = RendererFormat(chat_tokenizer, QWEN3)
    reply = format.parse(format.render(ASK), sampled(chat_tokenizer, text), SPECS)

    (call,) = reply.tool_calls
    assert call.problem is not None and problem in call.problem
    assert call.raw in reply.as_message()["content"]
    assert "tool_calls" not in reply.as_message()


def test_a_tool_call_message_can_be_rendered(chat_tokenizer: Any) -> None:
    """Assistant messages hold arguments as JSON text, as OpenAI's do; templates need objects."""
    format = RendererFormat(chat_tokenizer, QWEN3)
    message = Reply("", (ToolCall("warmth", {"city": "Köln"}, id="call_0"),)).as_message()
    text = chat_tokenizer.decode(format.render([*ASK, message, RESULT], SPECS))
    assert '{"name": "warmth", "arguments": {"city": "Köln"}}' in text


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"name": "auto"}, "name the model's renderer"),
        ({}, "name the model's renderer"),
        ({"name": "qwen33"}, "no renderer 'qwen33'; available: .*qwen3"),
        ({"name": "qwen3", "thinking": True}, "thinking"),
        ({"name": "kimi-k2"}, "doesn't fit the tokenizer"),
    ],
)
def test_an_invalid_renderer_configuration_is_refused_with_a_reason(
    chat_tokenizer: Any, config: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(FormatError, match=complaint):
        RendererFormat(chat_tokenizer, config)


def test_plain_text_extends_the_sampled_tokens(plain_tokenizer: Any) -> None:
    def render(messages: Sequence[Message]) -> str:
        return "".join(f"{message['content']}=" for message in messages)

    format = TextFormat(plain_tokenizer, render)
    prompt, output = format.render([{"role": "user", "content": "1+2"}]), [5, 1]
    following = format.extend(prompt, output, [{"role": "user", "content": "3"}])

    assert plain_tokenizer.decode(prompt) == "1+2="
    assert following == [*prompt, *output, *plain_tokenizer.encode("3=")]
    assert format.parse(prompt, output) == Reply("3")
