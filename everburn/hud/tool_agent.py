"""The policy as a HUD agent of several turns, with the tools of an environment.

Owns the conversion of an environment's MCP capabilities to tools, and of an episode to HUD's trace.
Doesn't own the turns (agentic/tool_loop.py) or formats.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mcp.types as mcp
from hud.agents.base import Agent
from hud.agents.types import AgentStep, ToolStep, Usage
from hud.agents.types import Sample as HudSample
from hud.capabilities import MCPClient
from hud.eval.run import Run
from hud.types import MCPToolCall, MCPToolResult

from everburn.agentic.formats import Format
from everburn.agentic.messages import Message
from everburn.agentic.tool_loop import Episode, Limits, run_tool_loop
from everburn.agentic.tools import Tool, ToolResult
from everburn.hud.prompts import as_messages
from everburn.rollouts.contract import RecoverableRolloutError, RolloutSetup


class EnvironmentToolError(RuntimeError):
    """An environment's tool failed. The policy sees the message."""


class ToolAgent(Agent):
    """Lets the policy use the tools of a task's environment until it answers without a tool call
    or reaches a limit. Its last answer is graded. Stateless: serves concurrent runs.
    """

    def __init__(self, setup: RolloutSetup, format: Format, limits: Limits) -> None:
        super().__init__()
        self._setup = setup
        self._format = format
        self._limits = limits

    async def __call__(self, run: Run) -> None:
        tools = await environment_tools(run)
        prompt = as_messages(run.prompt)
        episode = await run_tool_loop(self._setup, self._format, prompt, tools, self._limits)
        for step in _steps(episode, episode.messages[len(prompt) :]):
            run.record(step)
        run.trace.content = episode.answer


async def environment_tools(run: Run) -> list[Tool]:
    """Opens all MCP capabilities of a run's environment; returns their tools. With several
    capabilities, a tool's name is prefixed with its capability's.

    Raises:
        RecoverableRolloutError: a capability can't be reached.
    """
    manifest = run.client.manifest
    bindings = manifest.bindings if manifest is not None else []
    names = [binding.name for binding in bindings if binding.protocol == MCPClient.protocol]
    tools = []
    for name in names:
        prefix = f"{name}__" if len(names) > 1 else ""
        try:
            client = await run.client.open(name)
            assert isinstance(client, MCPClient)
            mcp_tools = await client.list_tools()
        except Exception as error:
            raise RecoverableRolloutError(
                f"the environment's capability {name} can't be reached: "
                f"{type(error).__name__}: {error}"
            ) from error
        tools += [_tool(client, tool, prefix) for tool in mcp_tools]
    return tools


def _tool(client: MCPClient, tool: mcp.Tool, prefix: str) -> Tool:
    call = partial(_call, client, tool.name)
    return Tool.described(prefix + tool.name, tool.description or "", tool.inputSchema, call)


async def _call(client: MCPClient, name: str, arguments: dict[str, Any]) -> ToolResult:
    try:
        result = await client.call_tool(name, arguments)
    except Exception as error:
        # Not an error of the tool: the environment can't be reached.
        raise RecoverableRolloutError(
            f"the environment's tool {name} can't be called: {type(error).__name__}: {error}"
        ) from error
    if result.isError:
        raise EnvironmentToolError(_text(result))
    return ToolResult(_text(result))


def _text(result: MCPToolResult) -> str:
    """The result as text, for the policy."""
    if not result.content and result.structuredContent is not None:
        return json.dumps(result.structuredContent, ensure_ascii=False)
    blocks: Sequence[Any] = result.content
    return "\n".join(
        block.text if isinstance(block, mcp.TextContent) else f"[{block.type}]" for block in blocks
    )


def _steps(episode: Episode, messages: Sequence[Message]) -> Iterator[AgentStep | ToolStep]:
    """The episode's messages as steps of HUD's trace, with the exact tokens of sampling calls."""
    calls = iter(episode.calls)
    for message in messages:
        match message["role"]:
            case "assistant":
                call = next(calls)
                yield AgentStep(
                    content=message["content"],
                    reasoning=message.get("reasoning_content"),
                    tool_calls=[_tool_call(part) for part in message.get("tool_calls", ())],
                    finish_reason="length" if call.truncated else "stop",
                    sample=HudSample(
                        prompt_token_ids=call.prompt,
                        output_token_ids=call.tokens,
                        output_logprobs=call.logprobs,
                    ),
                    usage=Usage(prompt_tokens=len(call.prompt), completion_tokens=len(call.tokens)),
                )
            case "tool":
                content = mcp.TextContent(type="text", text=message["content"])
                yield ToolStep(
                    call=MCPToolCall(id=message["tool_call_id"], name=message.get("name", "")),
                    result=MCPToolResult(content=[content]),
                )


def _tool_call(part: dict[str, Any]) -> MCPToolCall:
    function = part["function"]
    return MCPToolCall(
        id=part["id"], name=function["name"], arguments=json.loads(function["arguments"])
    )
