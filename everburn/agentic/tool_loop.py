"""The tool loop: sample the policy, run the tools that it calls, add their results, repeat.

Owns the order of turns, the limits and the end of an episode. Doesn't own tokens (formats.py),
tools (tools.py) or segments (assembly.py).

A retried completion reuses its finished sampling calls (everburn/rollouts/call_log.py) while its
prompts are unchanged. Its tools run again, which rebuilds the environment's state: a completion
killed in turn n continues in turn n if its tools are deterministic.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

from everburn.agentic.assembly import Call, OnBranch, assemble
from everburn.agentic.formats import Format
from everburn.agentic.messages import CallIds, Message, Reply, ToolCall, tool_message
from everburn.agentic.tools import Tool, ToolArgumentsError, ToolFunction, ToolResult
from everburn.rollouts.contract import (
    PromptTooLongError,
    RecoverableRolloutError,
    RolloutRun,
    RolloutSetup,
)

T = TypeVar("T")

EndReason = Literal["reply", "done", "turns", "seconds", "tokens", "truncated", "context"]
"""Why an episode ended.

reply: an answer without a tool call, to which the environment didn't respond. done: a tool or the
environment ended it. turns, seconds, tokens: a limit of the loop. truncated: an answer was cut off
at max_tokens; its tool calls weren't run. context: the next prompt leaves no room within
max_seq_len.
"""

MaybeAwaitable: TypeAlias = T | Awaitable[T]
Answer = str | ToolResult


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of an episode.

    turns: sampling calls. seconds: the whole episode. tokens: sampled tokens of all turns.
    tool_seconds: one tool call; a slower call counts as failed.
    """

    turns: int = 16
    seconds: float | None = None
    tokens: int | None = None
    tool_seconds: float | None = 60.0

    def __post_init__(self) -> None:
        for name in ("turns", "seconds", "tokens", "tool_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Limits.{name} is {value}; it must be positive")


@dataclass(slots=True)
class Episode:
    """A conversation between the policy and its environment. tool_calls: number of calls that were
    run. malformed: that couldn't be run. failed: that raised or timed out."""

    messages: list[Message]
    calls: list[Call] = field(default_factory=list)
    ended: EndReason = "reply"
    tool_calls: int = 0
    malformed: int = 0
    failed: int = 0

    @property
    def answer(self) -> str:
        answers = [m["content"] for m in self.messages if m["role"] == "assistant"]
        return str(answers[-1]) if answers else ""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(call.tokens) for call in self.calls)

    def run(
        self,
        reward: float,
        info: dict[str, Any] | None = None,
        on_branch: OnBranch = "split",
    ) -> RolloutRun:
        """The rollout, with its reward. `info` is added to the loop's counts.

        Raises:
            RecoverableRolloutError: time ran out before anything was sampled.
            TraceIntegrityError: under "reject", the conversation had to be rendered again.
        """
        assembled = assemble(self.calls, reward, on_branch)
        if not assembled.segments:
            raise RecoverableRolloutError(f"nothing was sampled ({self.ended})")
        counts = {
            "ended": self.ended,
            "turns": len(self.calls),
            "tool_calls": self.tool_calls,
            "malformed_calls": self.malformed,
            "failed_calls": self.failed,
            "boundaries": assembled.boundaries.as_info(),
        }
        # Without text, None shows the sampled tokens.
        return RolloutRun(assembled.segments, self.answer or None, counts | (info or {}))


def answer_malformed(call: ToolCall) -> Answer:
    """Default answer to a tool call that can't be run."""
    return f"Error: the call of {call.name or 'a tool'} can't be run: {call.problem}."


def answer_failure(call: ToolCall, error: Exception) -> Answer:
    """Default answer to a tool call that raised or timed out."""
    return f"Error: {call.name} failed: {type(error).__name__}: {error}"


def end_at_reply(reply: Reply) -> Answer | None:
    """Default for a reply without tool calls: the episode ends."""
    return None


async def run_tool_loop(
    setup: RolloutSetup,
    format: Format,
    messages: Sequence[Message],
    tools: Sequence[Tool | ToolFunction] = (),
    limits: Limits = Limits(),
    sampling: dict[str, Any] | None = None,
    on_malformed: Callable[[ToolCall], MaybeAwaitable[Answer]] = answer_malformed,
    on_failure: Callable[[ToolCall, Exception], MaybeAwaitable[Answer]] = answer_failure,
    on_reply: Callable[[Reply], MaybeAwaitable[Answer | None]] = end_at_reply,
) -> Episode:
    """Run an episode.

    tools: calls of one answer run one after another. sampling: overrides the run's settings.
    on_malformed: answers a call that can't be parsed, names no tool or has invalid arguments.
    on_failure: answers a call whose tool raised or timed out (TimeoutError). on_reply: answers a
    reply without tool calls; None ends the episode. Each may be async, return text or a ToolResult
    (which can end the episode), or raise.

    Raises:
        PromptTooLongError: the first prompt leaves no room.
        RecoverableRolloutError: from a tool; not the policy's fault, so not answered.
        Errors of sampling and of the `on_...` functions.
    """
    loop = _ToolLoop(
        setup,
        format,
        {tool.name: tool for tool in map(_as_tool, tools)},
        limits,
        setup.sampling_kwargs | (sampling or {}),
        on_malformed,
        on_failure,
        on_reply,
        Episode(list(messages)),
    )
    try:
        async with asyncio.timeout(limits.seconds) as clock:
            loop.episode.ended = await loop.turns()
    except TimeoutError:
        if not clock.expired():
            raise
        loop.episode.ended = "seconds"
    return loop.episode


@dataclass(slots=True)
class _ToolLoop:
    setup: RolloutSetup
    format: Format
    tools: dict[str, Tool]
    limits: Limits
    sampling: dict[str, Any]
    on_malformed: Callable[[ToolCall], MaybeAwaitable[Answer]]
    on_failure: Callable[[ToolCall, Exception], MaybeAwaitable[Answer]]
    on_reply: Callable[[Reply], MaybeAwaitable[Answer | None]]
    episode: Episode
    ids: CallIds = field(default_factory=CallIds)

    async def turns(self) -> EndReason:
        episode, specs = self.episode, [tool.spec for tool in self.tools.values()]
        prompt = self.format.render(episode.messages, specs)
        while True:
            ended = await self._sample(prompt)
            if ended is not None:
                return ended
            last = episode.calls[-1]
            reply = self.ids.assign(self.format.parse(prompt, last.tokens, specs))
            episode.messages.append(reply.as_message())
            if last.truncated:
                return "tokens" if self._tokens_left() == 0 else "truncated"
            count = len(episode.messages)
            ended = await self._answer(reply)
            if ended is not None:
                return ended
            new = episode.messages[count:]
            extended = self.format.extend(prompt, last.tokens, new, specs)
            if extended is None:
                extended = self.format.render(episode.messages, specs)
            prompt = extended

    async def _sample(self, prompt: list[int]) -> EndReason | None:
        if len(self.episode.calls) >= self.limits.turns:
            return "turns"
        tokens_left = self._tokens_left()
        if tokens_left == 0:
            return "tokens"
        settings = {"stop": self.format.stop} | self.sampling
        if tokens_left is not None:
            settings["max_tokens"] = min(settings["max_tokens"], tokens_left)
        try:
            sample = await self.setup.sampler.sample(prompt, **settings)
        except PromptTooLongError:
            if not self.episode.calls:
                raise
            return "context"
        self.episode.calls.append(Call.of(prompt, sample))
        return None

    def _tokens_left(self) -> int | None:
        if self.limits.tokens is None:
            return None
        return max(0, self.limits.tokens - self.episode.sampled_tokens)

    async def _answer(self, reply: Reply) -> EndReason | None:
        """Append the environment's messages in answer to a reply."""
        if not reply.tool_calls:
            answer: Answer | None = await _awaited(self.on_reply(reply))
            if answer is None:
                return "reply"
            result = _as_result(answer)
            self.episode.messages.append({"role": "user", "content": result.content})
            return "done" if result.done else None
        for call in reply.tool_calls:
            result = await self._result(call)
            self.episode.messages.append(tool_message(call, result.content))
            if result.done:
                return "done"
        return None

    async def _result(self, call: ToolCall) -> ToolResult:
        tool = self.tools.get(call.name or "")
        if call.problem is None and tool is None:
            call = replace(
                call, problem=f"there is no such tool; available: {', '.join(self.tools)}"
            )
        if call.problem is None and tool is not None:
            try:
                async with asyncio.timeout(self.limits.tool_seconds) as clock:
                    result = await tool.call(call.arguments or {})
                self.episode.tool_calls += 1
                return result
            except ToolArgumentsError as error:
                call = replace(call, problem=str(error))
            except RecoverableRolloutError:
                raise
            except Exception as error:
                if isinstance(error, TimeoutError) and clock.expired():
                    error = TimeoutError(f"no result within {self.limits.tool_seconds:g} s")
                self.episode.tool_calls += 1
                self.episode.failed += 1
                return _as_result(await _awaited(self.on_failure(call, error)))
        self.episode.malformed += 1
        return _as_result(await _awaited(self.on_malformed(call)))


def _as_tool(tool: Tool | ToolFunction) -> Tool:
    return tool if isinstance(tool, Tool) else Tool.of(tool)


def _as_result(answer: Answer) -> ToolResult:
    return answer if isinstance(answer, ToolResult) else ToolResult(answer)


async def _awaited(value: MaybeAwaitable[T]) -> T:
    return cast(T, await value if inspect.isawaitable(value) else value)
