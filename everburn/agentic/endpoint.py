"""An OpenAI-style endpoint beside a rollout, for agent frameworks that bring their own loop.

The framework gets a base URL and a key that belong to one completion; what it asks is sampled by
that completion's policy, and every call's exact tokens are kept. A request that goes on from an
earlier answer is told by its messages, and its prompt goes on from the earlier one's tokens: text
that has been sampled isn't tokenised again. Owns that matching and the routes. Doesn't own the wire
(openai_wire.py), the server (local_server.py) or which tokens are trained (assembly.py).
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from everburn.agentic import openai_wire as wire
from everburn.agentic.assembly import Call, OnBranch, assemble
from everburn.agentic.formats import Format
from everburn.agentic.local_server import LocalServer, local_server
from everburn.agentic.messages import CallIds, Message
from everburn.rollouts.contract import (
    PromptTooLongError,
    RecoverableRolloutError,
    RolloutRun,
    RolloutSetup,
)

T = TypeVar("T")


@asynccontextmanager
async def chat_endpoint(setup: RolloutSetup, format: Format) -> AsyncIterator["ChatEndpoint"]:
    """Serve the current completion's policy on 127.0.0.1 for as long as the block runs.

    The harness must not block the event loop, on which its own requests are answered: await it,
    run it as a process, or call it by `in_thread`.

    Raises:
        What sampling raised meanwhile, in place of what the harness made of it.
    """
    async with local_server() as server:
        endpoint = ChatEndpoint(setup, format, server)
        with server.mounted(endpoint.name, endpoint.answer):
            try:
                yield endpoint
            except Exception as error:
                if endpoint.failure is not None:
                    raise endpoint.failure from error
                raise
            finally:
                endpoint.close()


class ChatEndpoint:
    """One completion's endpoint.

    base_url, api_key: for the harness. calls: what was sampled so far, in order of completion.
    failure: why the policy couldn't be sampled, if so: the completion is worth nothing then.
    """

    def __init__(self, setup: RolloutSetup, format: Format, server: LocalServer) -> None:
        self._setup = setup
        self._format = format
        # Requests arrive outside of the completion: its scope is taken along.
        self._context = copy_context()
        self._turns: list[_Turn] = []
        self._ids = CallIds()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.name = secrets.token_urlsafe(16)
        self.api_key = secrets.token_urlsafe(16)
        self.base_url = f"{server.url}/{self.name}/v1"
        self.failure: Exception | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables in which OpenAI's clients look, for a harness in a process of its own."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}

    @property
    def calls(self) -> list[Call]:
        return [turn.call for turn in self._turns]

    def run(
        self,
        reward: float,
        answer: str | None = None,
        info: dict[str, Any] | None = None,
        on_branch: OnBranch = "split",
    ) -> RolloutRun:
        """The rollout of all calls, with its reward.

        Raises:
            What sampling raised meanwhile, also where the harness took no notice.
            RecoverableRolloutError: nothing was sampled.
            TraceIntegrityError: under "reject", calls that aren't one conversation.
        """
        if self.failure is not None:
            raise self.failure
        assembled = assemble(self.calls, reward, on_branch)
        if not assembled.segments:
            raise RecoverableRolloutError("the harness has asked for nothing")
        counts = {"turns": len(self.calls), "boundaries": assembled.boundaries.as_info()}
        if answer is None:
            # Where the last one is all tool calls, the sampled text says more.
            answer = str(self._turns[-1].message["content"]) or None
        return RolloutRun(assembled.segments, answer, counts | (info or {}))

    async def answer(self, request: Request, path: str) -> Response:
        """Answer a request to `/<name>/<path>`."""
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _refusal(401, "this isn't the completion's key", code="invalid_api_key")
        if (request.method, path) == ("GET", "v1/models"):
            model = {"id": self._setup.model, "object": "model", "owned_by": "everburn"}
            return JSONResponse({"object": "list", "data": [model]})
        if (request.method, path) != ("POST", "v1/chat/completions"):
            return _refusal(404, f"there is no {request.method} /{path} here")
        try:
            asked = wire.parse_request(await request.json())
        except ValueError as error:
            return _refusal(400, str(error), getattr(error, "param", None))
        try:
            answer = await self._unless_gone(request, self._turn(asked))
        except PromptTooLongError as error:
            # Harnesses know this one, and shorten their history.
            return _refusal(400, str(error), "messages", "context_length_exceeded")
        except Exception as error:
            self.failure = self.failure or error
            return _refusal(500, f"the policy can't be sampled: {error}")
        if answer is None:
            return Response(status_code=499)
        if asked.stream:
            events = answer.events(asked.stream_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(answer.body())

    def close(self) -> None:
        """Nobody waits for what is still being sampled."""
        for task in self._tasks:
            task.cancel()

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of sampling; None if the harness hangs up first. What it gave up isn't
        sampled on beside its next try, and is no part of the rollout."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        gone = asyncio.ensure_future(_hung_up(request))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        except asyncio.CancelledError:
            if task.cancelled():
                return None  # the rollout has ended
            raise
        finally:
            task.cancel()
            gone.cancel()
            self._tasks.discard(task)

    async def _turn(self, asked: wire.ChatRequest) -> wire.ChatAnswer:
        prompt = self._prompt(asked)
        kwargs = self._setup.sampling_kwargs
        wanted = [n for n in (asked.max_tokens, kwargs.get("max_tokens")) if n is not None]
        settings = kwargs | {"stop": [*(self._format.stop or ()), *asked.stop] or None}
        if wanted:
            settings["max_tokens"] = min(wanted)
        sample = await self._setup.sampler.sample(prompt, **settings)
        reply = self._ids.given(self._format.parse(prompt, sample.tokens, asked.tools))
        turn = _Turn(asked, reply.as_message(), Call.of(prompt, sample))
        self._turns.append(turn)
        return wire.ChatAnswer(
            id=f"chatcmpl-{len(self._turns)}",
            created=int(time.time()),
            model=asked.model,
            message=turn.message,
            truncated=turn.call.truncated,
            prompt_tokens=len(prompt),
            completion_tokens=len(sample.tokens),
        )

    def _prompt(self, asked: wire.ChatRequest) -> list[int]:
        """The tokens of a request: those of the turn that it goes on from and what is new, or
        everything rendered."""
        goes_on = [turn for turn in self._turns if turn.is_continued_by(asked)]
        if goes_on:
            turn = max(goes_on, key=lambda turn: len(turn.request.messages))
            new = asked.messages[len(turn.request.messages) + 1 :]
            call = turn.call
            extended = self._format.extend(call.prompt, call.tokens, new, asked.tools)
            if extended is not None:
                return extended
        return self._format.render(asked.messages, asked.tools)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request that was answered."""

    request: wire.ChatRequest
    message: Message
    call: Call

    def is_continued_by(self, asked: wire.ChatRequest) -> bool:
        """Whether a request holds this one's messages, its answer, and something new."""
        known = [*self.request.messages, self.message]
        return (
            len(asked.messages) > len(known)
            and asked.tools == self.request.tools
            and all(
                wire.said(old) == wire.said(new)
                for old, new in zip(known, asked.messages, strict=False)
            )
        )


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = wire.error_body(message, kind, param, code)
    # What can't be sampled now is the run's to repeat, with the whole completion.
    return JSONResponse(body, status, headers={"x-should-retry": "false"})
