"""Formats: messages to tokens and back.

Owns the protocol that the tool loop and the endpoint use, and two implementations: chat models
through the `renderers` package, and plain text. Both extend the exact sampled tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from everburn.agentic.messages import Message, Reply, ToolCall

if TYPE_CHECKING:
    from renderers import ParsedToolCall, Renderer, RendererConfig

ToolSpecs = Sequence[dict[str, Any]]
"""Tools in OpenAI's form, `{"type": "function", "function": {...}}`."""


class FormatError(ValueError):
    """The format can't be created; the message says what to write instead."""


class Format(Protocol):
    """How the policy sees a conversation."""

    @property
    def stop(self) -> Sequence[str] | None:
        """Strings that end an answer, besides the model's end token."""

    def render(self, messages: Sequence[Message], tools: ToolSpecs = ()) -> list[int]:
        """The prompt tokens of a whole conversation, generation prompt included."""

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: ToolSpecs = (),
    ) -> list[int] | None:
        """The next prompt: exactly `prompt` and `output`, then the new messages. None if that is
        impossible; rendering the whole conversation then begins a new segment."""

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: ToolSpecs = ()) -> Reply:
        """Never raises: unreadable parts become text, or a ToolCall with a problem."""


class TextFormat:
    """Plain text, for models without a chat template.

    render: text of messages, generation prompt included. Must be additive:
    `render(a + b) == render(a) + render(b)`. parse: reads an answer's text (no special tokens).
    stop: strings that end an answer, if not the model's end token.
    """

    def __init__(
        self,
        tokenizer: Any,
        render: Callable[[Sequence[Message]], str],
        parse: Callable[[str], Reply] = Reply,
        stop: Sequence[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self._parse = parse
        self.stop = stop

    def render(self, messages: Sequence[Message], tools: ToolSpecs = ()) -> list[int]:
        return self._encode(messages)

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: ToolSpecs = (),
    ) -> list[int] | None:
        return [*prompt, *output, *self._encode(new)]

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: ToolSpecs = ()) -> Reply:
        return self._parse(self._tokenizer.decode(list(output), skip_special_tokens=True))

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        text = self._render(messages)
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class RendererFormat:
    """A chat model's format, through the `renderers` package.

    config: one of its typed configurations, or a mapping such as
    `{"name": "qwen3", "enable_thinking": false}`. The name is required: a wrong guess would give a
    renderer without tool calls and extension. Raises FormatError.
    """

    stop: Sequence[str] | None = None
    """The server knows the end tokens; as stop strings they might be missing from the samples."""

    def __init__(self, tokenizer: Any, config: "RendererConfig | Mapping[str, Any]") -> None:
        self._renderer = _renderer(tokenizer, config)

    def render(self, messages: Sequence[Message], tools: ToolSpecs = ()) -> list[int]:
        ids = self._renderer.render_ids(
            _normalized(messages), tools=_specs(tools), add_generation_prompt=True
        )
        return list(ids)

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: ToolSpecs = (),
    ) -> list[int] | None:
        bridged = self._renderer.bridge_to_next_turn(
            list(prompt), list(output), _normalized(new), tools=_specs(tools)
        )
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: ToolSpecs = ()) -> Reply:
        parsed = self._renderer.parse_response(
            list(output), tools=_specs(tools), prompt_ids=list(prompt)
        )
        return Reply(
            content=parsed.content,
            tool_calls=tuple(map(_tool_call, parsed.tool_calls)),
            reasoning=parsed.reasoning_content,
        )


_PROBLEMS = {
    "invalid_json": "its arguments aren't valid JSON",
    "unclosed_block": "it isn't closed",
    "missing_name": "it names no tool",
    "malformed_structure": "it doesn't have the form of a tool call",
    "unknown_tool": "there is no such tool",
}


def _tool_call(parsed: "ParsedToolCall") -> ToolCall:
    problem = _PROBLEMS.get(parsed.status.value)
    arguments = parsed.arguments
    if isinstance(arguments, str):
        arguments = _json_object(arguments)
    elif not isinstance(arguments, dict):
        arguments = None
    if problem is None and parsed.status.value != "ok":
        problem = f"it can't be read ({parsed.status.value})"
    if problem is None and arguments is None:
        problem = "its arguments aren't a JSON object"
    return ToolCall(parsed.name, arguments, parsed.raw, problem, parsed.id)


def _json_object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _normalized(messages: Sequence[Message]) -> Any:
    """Messages as renderers need them: content isn't None, and arguments are objects."""
    return [_normalized_message(message) for message in messages]


def _normalized_message(message: Message) -> Message:
    normalized = message | {"content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        normalized["tool_calls"] = [_normalized_call(call) for call in calls]
    return normalized


def _normalized_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    parsed = _json_object(arguments) if isinstance(arguments, str) else arguments
    # Text that isn't a JSON object stays as the policy wrote it.
    return call | {"function": function | {"arguments": arguments if parsed is None else parsed}}


def _specs(tools: ToolSpecs) -> Any:
    return list(tools) or None


def _renderer(tokenizer: Any, config: "RendererConfig | Mapping[str, Any]") -> "Renderer":
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig, create_renderer

    name = config.get("name") if isinstance(config, Mapping) else getattr(config, "name", None)
    if name in (None, "auto"):
        raise FormatError(
            "name the model's renderer, for example {'name': 'qwen3'}; available: "
            f"{', '.join(_names())}"
        )
    try:
        typed = TypeAdapter[Any](RendererConfig).validate_python(config)
        return create_renderer(tokenizer, typed)
    except ValidationError as error:
        if any(e["type"] == "union_tag_invalid" for e in error.errors()):
            raise FormatError(
                f"there is no renderer {name!r}; available: {', '.join(_names())}"
            ) from None
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()
        )
        raise FormatError(f"renderer {name!r}: {problems}") from None
    except (AssertionError, ImportError, ValueError) as error:
        tokenizer_name = getattr(tokenizer, "name_or_path", "unnamed")
        raise FormatError(
            f"renderer {name!r} doesn't fit the tokenizer {tokenizer_name!r}: {error}"
        ) from error


def _names() -> list[str]:
    from typing import get_args

    from renderers import RendererConfig

    variants = get_args(get_args(RendererConfig)[0])
    names = {str(variant.model_fields["name"].default) for variant in variants}
    return sorted(names - {"auto"})
