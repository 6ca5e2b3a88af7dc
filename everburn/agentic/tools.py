"""Tools: what the policy calls by name, Python functions above all.

Owns what a function's signature says of a tool (name, description, JSON schema), the check of
arguments against it, and the call itself. Doesn't own when tools are called or how their failures
are answered (tool_loop.py).
"""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from everburn.usercode.threads import in_thread


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answers. done: the episode ends here; the policy isn't asked again."""

    content: str
    done: bool = False


ToolFunction = Callable[..., "str | ToolResult | Awaitable[str | ToolResult]"]
ToolCaller = Callable[[dict[str, Any]], Awaitable[ToolResult]]


class ToolArgumentsError(ValueError):
    """Arguments that a tool doesn't take; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the policy sees it: a function (`Tool.of`), or whatever answers calls.

    spec: in OpenAI's form. call: answers what the policy wrote; raises ToolArgumentsError where
    that doesn't fit.
    """

    name: str
    spec: dict[str, Any]
    call: ToolCaller

    @classmethod
    def of(cls, function: ToolFunction, name: str | None = None) -> "Tool":
        """A tool of a function: its name, docstring and annotated parameters.

        The function may block: it runs on a thread of its own. It may be async, and then may
        not block.

        Raises:
            TypeError: a parameter isn't annotated, or can't be passed by name.
        """
        name = name or function.__name__
        model = _arguments_model(function, name)
        schema = model.model_json_schema(schema_generator=_Untitled)
        parameters = {k: v for k, v in schema.items() if k != "title"}
        description = inspect.getdoc(function) or ""
        return cls.described(name, description, parameters, partial(_call, function, model))

    @classmethod
    def described(
        cls, name: str, description: str, parameters: dict[str, Any], call: ToolCaller
    ) -> "Tool":
        """A tool of something else; parameters: the JSON schema of its arguments."""
        function = {"name": name, "description": description, "parameters": parameters}
        return cls(name, {"type": "function", "function": function}, call)


async def _call(
    function: ToolFunction, model: type[BaseModel], arguments: dict[str, Any]
) -> ToolResult:
    try:
        read = model.model_validate(arguments)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ToolArgumentsError("; ".join(problems)) from None
    values = {name: getattr(read, name) for name in type(read).model_fields}
    if inspect.iscoroutinefunction(function):
        answer = await function(**values)
    else:
        answer = await in_thread(lambda: function(**values))
        if inspect.isawaitable(answer):
            answer = await answer
    return answer if isinstance(answer, ToolResult) else ToolResult(str(answer))


class _Untitled(GenerateJsonSchema):
    """Without the titles that pydantic makes of names: each costs tokens in every prompt."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _arguments_model(function: ToolFunction, name: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {name}: *{parameter.name} can't be described to the policy")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"tool {name}: {parameter.name} can't be passed by name")
        if parameter.annotation is parameter.empty:
            raise TypeError(f"tool {name}: annotate {parameter.name}, for example with str")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (parameter.annotation, default)
    model: type[BaseModel] = create_model(
        name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
    )
    return model
