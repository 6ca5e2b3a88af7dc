"""Messages of a conversation, and parsed answers.

Owns the types shared by formats (formats.py), the tool loop and the endpoint. Messages have
OpenAI's form, which renderers, harnesses and chat templates share.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
"""`role` and `content`, and optionally `tool_calls`, `tool_call_id`, `name`,
`reasoning_content`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """name, arguments: None if unreadable. raw: the sampled text. problem: for the policy, why the
    call can't be run; None if it can. id: referenced by the result; None if the format has none."""

    name: str | None
    arguments: dict[str, Any] | None
    raw: str = ""
    problem: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A parsed answer: text, tool calls in order, and reasoning if the format separates it."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def as_message(self) -> Message:
        """The assistant message. A call that can't be run stays in the text as sampled."""
        broken = [call.raw for call in self.tool_calls if call.problem is not None]
        text = "\n".join(part for part in (self.content, *broken) if part)
        message: Message = {"role": "assistant", "content": text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        calls = [_as_part(call) for call in self.tool_calls if call.problem is None]
        return message | ({"tool_calls": calls} if calls else {})


@dataclass
class CallIds:
    """Tool call ids, unique within a completion and the same in every attempt."""

    _count: int = 0

    def assign(self, reply: Reply) -> Reply:
        calls = []
        for call in reply.tool_calls:
            calls.append(replace(call, id=call.id or f"call_{self._count}"))
            self._count += 1
        return replace(reply, tool_calls=tuple(calls))


def _as_part(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or "", "type": "function", "function": function}


def tool_message(call: ToolCall, content: str) -> Message:
    message: Message = {"role": "tool", "tool_call_id": call.id or "", "content": content}
    return message | ({"name": call.name} if call.name else {})
