"""Messages to tokens and back.

Owns the protocol that the tool loop and the endpoint speak, and its two implementations: chat
models by the `renderers` package, and plain text by functions of the environment. Both go on from
the exact tokens that were sampled; neither tokenises a sampled answer again while it needn't.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from everburn.agentic.messages import Message, Reply, ToolCall

if TYPE_CHECKING:
    from renderers import ParsedToolCall, Renderer, RendererConfig

ToolSpecs = Sequence[dict[str, Any]]
"""Tools in OpenAI's form, `{"type": "function", "function": {...}}`: the form that models were
trained on, and the only one used here."""


class FormatError(ValueError):
    """A format that can't be made; says what to write instead."""


class Format(Protocol):
    """How a conversation looks to the policy."""

    @property
    def stop(self) -> Sequence[str] | None:
        """Strings that end an answer, besides the model's own end token."""

    def render(self, messages: Sequence[Message], tools: ToolSpecs = ()) -> list[int]:
        """A whole conversation, up to where the policy answers."""

    def extend(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        new: Sequence[Message],
        tools: ToolSpecs = (),
    ) -> list[int] | None:
        """The next prompt, which begins with `prompt` and `output` exactly; None if the format
        can't: then the conversation is rendered anew, and a new segment begins."""

    def parse(self, prompt: Sequence[int], output: Sequence[int], tools: ToolSpecs = ()) -> Reply:
        """What sampled tokens say. Never raises: what can't be read is text, or a ToolCall with
        a problem."""


class TextFormat:
    """Plain text, for models without a chat template.

    render: the text of some messages, up to where the policy goes on. The text of a conversation
    must be that of its parts in a row: `render(a + b) == render(a) + render(b)`.
    parse: what the text of an answer says, without special tokens.
    stop: strings that end an answer, where it isn't the model's end token.
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
    """A chat model's own format, by the `renderers` package.

    config: one of its typed configurations, or the same as a mapping, as a run's `extras` hold it:
    `{"name": "qwen3", "enable_thinking": false}`. The model's family has to be named: a guess by
    the tokenizer's name would fall back to a renderer that knows neither tool calls nor how to
    go on from sampled tokens.

    Raises:
        FormatError: the configuration is wrong, or doesn't fit the tokenizer.
    """

    stop: Sequence[str] | None = None
    """The model's end tokens are the server's to know. Passed as strings, they might be left out
    of the sampled tokens."""

    def __init__(self, tokenizer: Any, config: "RendererConfig | Mapping[str, Any]") -> None:
        self._renderer = _renderer(tokenizer, config)

    def render(self, messages: Sequence[Message], tools: ToolSpecs = ()) -> list[int]:
        ids = self._renderer.render_ids(
            _readable(messages), tools=_specs(tools), add_generation_prompt=True
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
            list(prompt), list(output), _readable(new), tools=_specs(tools)
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
        arguments = _object(arguments)
    elif not isinstance(arguments, dict):
        arguments = None
    if problem is None and parsed.status.value != "ok":
        problem = f"it can't be read ({parsed.status.value})"
    if problem is None and arguments is None:
        problem = "its arguments aren't a JSON object"
    return ToolCall(parsed.name, arguments, parsed.raw, problem, parsed.id)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _readable(messages: Sequence[Message]) -> Any:
    """Messages as renderers take them: content is never None, and arguments are objects, since
    templates write them out value by value."""
    return [_with_objects(message) for message in messages]


def _with_objects(message: Message) -> Message:
    readable = message | {"content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        readable["tool_calls"] = [_with_object(call) for call in calls]
    return readable


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    read = _object(arguments) if isinstance(arguments, str) else arguments
    # What isn't an object stays as it was written: it is what the policy said.
    return call | {"function": function | {"arguments": arguments if read is None else read}}


def _specs(tools: ToolSpecs) -> Any:
    return list(tools) or None


def _renderer(tokenizer: Any, config: "RendererConfig | Mapping[str, Any]") -> "Renderer":
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig, create_renderer

    name = config.get("name") if isinstance(config, Mapping) else getattr(config, "name", None)
    if name in (None, "auto"):
        raise FormatError(
            "name the model's renderer, for example {'name': 'qwen3'}; there are "
            f"{', '.join(_names())}"
        )
    try:
        typed = TypeAdapter[Any](RendererConfig).validate_python(config)
        return create_renderer(tokenizer, typed)
    except ValidationError as error:
        if any(e["type"] == "union_tag_invalid" for e in error.errors()):
            raise FormatError(
                f"there is no renderer {name!r}; there are {', '.join(_names())}"
            ) from None
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'][1:]))}: {e['msg']}" for e in error.errors()
        )
        raise FormatError(f"renderer {name!r}: {problems}") from None
    except (AssertionError, ImportError, ValueError) as error:
        where = getattr(tokenizer, "name_or_path", "unnamed")
        raise FormatError(
            f"renderer {name!r} doesn't fit the tokenizer {where!r}: {error}"
        ) from error


def _names() -> list[str]:
    from typing import get_args

    from renderers import RendererConfig

    variants = get_args(get_args(RendererConfig)[0])
    names = {str(variant.model_fields["name"].default) for variant in variants}
    return sorted(names - {"auto"})
