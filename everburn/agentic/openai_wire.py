"""OpenAI's chat completions wire format: requests in, answers and events out.

Owns the supported and the refused request fields, and the shapes of answers. Doesn't own how
answers are made (endpoint.py).
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everburn.agentic.messages import Message

ROLES = ("system", "user", "assistant", "tool")

_REFUSED = {
    "n": (1,),
    "logprobs": (False,),
    "tool_choice": ("auto", "none"),
    "response_format": ({"type": "text"},),
    "functions": (),
    "audio": (),
    "prediction": (),
}
"""Unsupported fields that would change the answer, with their harmless values."""


class RequestError(ValueError):
    """An invalid request; `param` is the wrong field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of a harness. temperature, top_p and seed are ignored: the run's settings define
    the distribution that is sampled and trained."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]]
    max_tokens: int | None
    stop: list[str]
    stream: bool
    stream_usage: bool


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer. message: the assistant message. prompt_tokens, completion_tokens: counts."""

    id: str
    created: int
    model: str
    message: Message
    truncated: bool
    prompt_tokens: int
    completion_tokens: int

    @property
    def finish_reason(self) -> str:
        if self.truncated:
            return "length"
        return "tool_calls" if self.message.get("tool_calls") else "stop"

    @property
    def usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def body(self) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": self.message,
            "logprobs": None,
            "finish_reason": self.finish_reason,
        }
        return self._head("chat.completion") | {"choices": [choice], "usage": self.usage}

    def events(self, usage: bool) -> Iterator[str]:
        """The answer as server-sent events, sent after sampling has finished."""
        for delta in self._deltas():
            yield self._event([{"index": 0, "delta": delta, "finish_reason": None}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.finish_reason}])
        if usage:
            yield self._event([], self.usage)
        yield "data: [DONE]\n\n"

    def _deltas(self) -> Iterator[Message]:
        yield {"role": "assistant", "content": ""}
        for field in ("reasoning_content", "content"):
            if self.message.get(field):
                yield {field: self.message[field]}
        for index, call in enumerate(self.message.get("tool_calls", ())):
            yield {"tool_calls": [{"index": index} | call]}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        chunk = self._head("chat.completion.chunk") | {"choices": choices}
        if usage is not None:
            chunk["usage"] = usage
        return f"data: {json.dumps(chunk)}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def parse_request(body: object) -> ChatRequest:
    """Raises RequestError, naming the field."""
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    for field, harmless in _REFUSED.items():
        value = body.get(field)
        if value is not None and value not in harmless:
            raise RequestError(f"{field}={value!r} isn't supported", field)
    tools = [] if body.get("tool_choice") == "none" else _list(body, "tools")
    for tool in tools:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise RequestError("a tool must be {'type': 'function', 'function': {...}}", "tools")
    stop = body.get("stop") or []
    options = body.get("stream_options") or {}
    return ChatRequest(
        model=str(body.get("model") or "policy"),
        messages=_messages(body),
        tools=tools,
        max_tokens=_count(body, "max_completion_tokens") or _count(body, "max_tokens"),
        stop=[stop] if isinstance(stop, str) else list(map(str, stop)),
        stream=bool(body.get("stream")),
        stream_usage=bool(options.get("include_usage")),
    )


def error_body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def comparable(message: Message) -> object:
    """The parts of a message that identify it when a harness sends it back, possibly with fields
    added or removed."""
    calls = [
        (call.get("id"), call["function"]["name"], _value(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], message["content"].strip(), calls, message.get("tool_call_id")


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = _list(body, "messages")
    if not messages:
        raise RequestError("there are no messages", "messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object", "messages")
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise RequestError(
            f"{where}.role is {role!r}; it must be one of {', '.join(ROLES)}", "messages"
        )
    parsed: Message = {"role": role, "content": _text(message.get("content"), where)}
    for field in ("tool_call_id", "name", "reasoning_content"):
        if message.get(field) is not None:
            parsed[field] = message[field]
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = [_call(call, where) for call in calls]
    return parsed


def _call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{where}.tool_calls contains {call!r}, which names no function", "messages"
        )
    assert isinstance(call, dict)
    return {"id": call.get("id") or "", "type": "function", "function": function}


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}.content must be text", "messages")
    return "".join(map(str, texts))


def _list(body: Mapping[str, Any], field: str) -> list[Any]:
    value = body.get(field) or []
    if not isinstance(value, list):
        raise RequestError(f"{field} must be a list", field)
    return value


def _count(body: Mapping[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"{field} must be a positive integer", field)
    return value


def _value(arguments: object) -> object:
    """Arguments in canonical JSON if they are JSON: equal values may be written differently."""
    try:
        return json.dumps(json.loads(str(arguments)), sort_keys=True)
    except ValueError:
        return arguments
