"""Messages of a conversation, and what a sampled answer says.

Owns the types between formats (formats.py), the tool loop and the endpoint. Messages have OpenAI's
form, which is what renderers, harnesses and chat templates share.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

Message = dict[str, Any]
"""`role` and `content`; where they apply `tool_calls`, `tool_call_id`, `name` and
`reasoning_content`."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the policy made, or tried to make.

    name, arguments: None where they couldn't be read. raw: the call as it was written.
    problem: why it can't be run, in words for the policy; None if it can.
    id: by which its result refers to it; None where the format has none.
    """

    name: str | None
    arguments: dict[str, Any] | None
    raw: str = ""
    problem: str | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A sampled answer, read: text, tool calls in their order, and reasoning where it is apart."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None

    def as_message(self) -> Message:
        """The assistant's message. A call that can't be run stays in the text, as it was written:
        there is no other form for it."""
        broken = [call.raw for call in self.tool_calls if call.problem is not None]
        text = "\n".join(part for part in (self.content, *broken) if part)
        message: Message = {"role": "assistant", "content": text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        calls = [_as_part(call) for call in self.tool_calls if call.problem is None]
        return message | ({"tool_calls": calls} if calls else {})


@dataclass
class CallIds:
    """Ids for the tool calls of one completion: unique in it, since by them a result finds its
    call, and the same in every attempt."""

    _seen: int = 0

    def given(self, reply: Reply) -> Reply:
        """The answer with an id on every call; those that have one keep it."""
        calls = []
        for call in reply.tool_calls:
            calls.append(replace(call, id=call.id or f"call_{self._seen}"))
            self._seen += 1
        return replace(reply, tool_calls=tuple(calls))


def _as_part(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id or "", "type": "function", "function": function}


def tool_message(call: ToolCall, content: str) -> Message:
    """The result of a tool call, or the complaint about it."""
    message: Message = {"role": "tool", "tool_call_id": call.id or "", "content": content}
    return message | ({"name": call.name} if call.name else {})
