"""Tools: specifications from signatures, and the check of arguments."""

import asyncio
import threading
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from everburn.agentic.tools import Tool, ToolArgumentsError, ToolResult, in_thread


def move(
    direction: Literal["LEFT", "RIGHT"], steps: Annotated[int, Field(ge=1)] = 1
) -> str | ToolResult:
    """Move on the lake.

    One step unless told otherwise.
    """
    return f"{direction}*{steps}"


def test_a_signature_becomes_a_specification() -> None:
    assert Tool.of(move).spec == {
        "type": "function",
        "function": {
            "name": "move",
            "description": "Move on the lake.\n\nOne step unless told otherwise.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "direction": {"type": "string", "enum": ["LEFT", "RIGHT"]},
                    "steps": {"type": "integer", "minimum": 1, "default": 1},
                },
                "required": ["direction"],
            },
        },
    }


async def test_arguments_are_checked_against_the_signature() -> None:
    tool = Tool.of(move)
    assert await tool.call({"direction": "LEFT"}) == ToolResult("LEFT*1")
    assert await tool.call({"direction": "LEFT", "steps": "2"}) == ToolResult("LEFT*2")
    with pytest.raises(ToolArgumentsError, match=r"direction: .*'LEFT' or 'RIGHT'"):
        await tool.call({"direction": "UP"})
    with pytest.raises(ToolArgumentsError, match="speed: "):
        await tool.call({"direction": "LEFT", "speed": 3})
    with pytest.raises(ToolArgumentsError, match="direction: Field required"):
        await tool.call({})


async def test_async_functions_and_methods_are_tools() -> None:
    class Lake:
        async def look(self, far: bool) -> ToolResult:
            return ToolResult(f"ice {far}", done=True)

    tool = Tool.of(Lake().look, name="see")
    assert (tool.name, tool.spec["function"]["description"]) == ("see", "")
    assert await tool.call({"far": True}) == ToolResult("ice True", done=True)


async def test_blocking_functions_run_concurrently() -> None:
    """More of them than the default thread pool has threads."""
    barrier = threading.Barrier(64, timeout=30)

    def meet() -> str:
        barrier.wait()
        return "met"

    results = await asyncio.gather(*(Tool.of(meet).call({}) for _ in range(64)))
    assert {result.content for result in results} == {"met"}


async def test_in_thread_raises_the_threads_error_and_can_be_abandoned() -> None:
    def fail() -> str:
        raise KeyError("lake")

    with pytest.raises(KeyError, match="lake"):
        await in_thread(fail)

    go, done = threading.Event(), threading.Event()

    def slow() -> None:
        go.wait(30)
        done.set()

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await in_thread(slow)
    go.set()
    assert done.wait(30)


async def test_a_stop_iteration_of_a_tool_is_its_failure() -> None:
    """A coroutine can't raise StopIteration."""

    def find(name: str) -> str:
        return next(item for item in ("axe", "rope") if item == name)

    with pytest.raises(RuntimeError, match=r"it raised StopIteration\(\)") as caught:
        async with asyncio.timeout(10):
            await Tool.of(find).call({"name": "lamp"})
    assert isinstance(caught.value.__cause__, StopIteration)


def untyped(place) -> str:  # type: ignore[no-untyped-def]
    return ""


def variadic(*places: str) -> str:
    return ""


@pytest.mark.parametrize(
    ("function", "complaint"),
    [(untyped, "annotate place"), (variadic, r"\*places can't be described")],
)
def test_a_function_without_a_complete_signature_is_refused(function: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        Tool.of(function)
