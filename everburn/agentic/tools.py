"""Tools that the policy calls by name, mostly Python functions.

Owns the specification from a function's signature, the check of arguments, and the call. Doesn't
own the answers to failures (tool_loop.py).
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
    """The answer of a tool. done: ends the episode."""

    content: str
    done: bool = False


ToolFunction = Callable[..., "str | ToolResult | Awaitable[str | ToolResult]"]
ToolCaller = Callable[[dict[str, Any]], Awaitable[ToolResult]]


class ToolArgumentsError(ValueError):
    """Invalid arguments of a tool call; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the policy sees it. spec: in OpenAI's form. call: takes the policy's arguments;
    raises ToolArgumentsError if they are invalid."""

    name: str
    spec: dict[str, Any]
    call: ToolCaller

    @classmethod
    def of(cls, function: ToolFunction, name: str | None = None) -> "Tool":
        """A tool made from a function's name, docstring and annotated parameters. A plain function
        runs on its own thread and may block; an async function must not.

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
        """A tool that isn't a function. parameters: JSON schema of its arguments."""
        function = {"name": name, "description": description, "parameters": parameters}
        return cls(name, {"type": "function", "function": function}, call)


async def _call(
    function: ToolFunction, model: type[BaseModel], arguments: dict[str, Any]
) -> ToolResult:
    try:
        validated = model.model_validate(arguments)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ToolArgumentsError("; ".join(problems)) from None
    values = {name: getattr(validated, name) for name in model.model_fields}
    if inspect.iscoroutinefunction(function):
        answer = await function(**values)
    else:
        answer = await in_thread(lambda: function(**values))
        if inspect.isawaitable(answer):
            answer = await answer
    return answer if isinstance(answer, ToolResult) else ToolResult(str(answer))


class _Untitled(GenerateJsonSchema):
    """Omits pydantic's titles, which would cost tokens in every prompt."""

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
