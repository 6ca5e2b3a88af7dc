"""An OpenAI-compatible endpoint for one rollout, for agent frameworks with their own loop.

Each completion has its own base URL and key, and keeps the exact tokens of each call. A request
that continues an earlier one is recognized by its messages, and its prompt extends the earlier
tokens: sampled text is never tokenized again. Owns that matching and the routes. Doesn't own the
wire format (openai_wire.py), the server (local_server.py) or segments (assembly.py).
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
    """Serve the current completion's policy on 127.0.0.1 inside the block.

    The harness must not block the event loop, which answers its requests: await it, run it as a
    process, or call it with `in_thread`.

    Raises:
        The error of sampling, if there was one, instead of the harness's error.
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
    """base_url, api_key: for the harness. calls: in the order in which they finished. failure: the
    first error of sampling, which makes the completion unusable."""

    def __init__(self, setup: RolloutSetup, format: Format, server: LocalServer) -> None:
        self._setup = setup
        self._format = format
        # The server handles requests outside the completion's context.
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
        """Variables that OpenAI clients read, for a harness that runs as a process."""
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
            The error of sampling, if there was one, even if the harness ignored it.
            RecoverableRolloutError: nothing was sampled.
            TraceIntegrityError: under "reject", the calls aren't one conversation.
        """
        if self.failure is not None:
            raise self.failure
        assembled = assemble(self.calls, reward, on_branch)
        if not assembled.segments:
            raise RecoverableRolloutError("the harness has sampled nothing")
        counts = {"turns": len(self.calls), "boundaries": assembled.boundaries.as_info()}
        if answer is None:
            # Without text, None shows the sampled tokens.
            answer = str(self._turns[-1].message["content"]) or None
        return RolloutRun(assembled.segments, answer, counts | (info or {}))

    async def answer(self, request: Request, path: str) -> Response:
        if request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _refusal(401, "this isn't the completion's key", code="invalid_api_key")
        if (request.method, path) == ("GET", "v1/models"):
            model = {"id": self._setup.model, "object": "model", "owned_by": "everburn"}
            return JSONResponse({"object": "list", "data": [model]})
        if (request.method, path) != ("POST", "v1/chat/completions"):
            return _refusal(404, f"there is no {request.method} /{path} here")
        try:
            chat = wire.parse_request(await request.json())
        except ValueError as error:
            return _refusal(400, str(error), getattr(error, "param", None))
        try:
            answer = await self._until_disconnect(request, self._turn(chat))
        except PromptTooLongError as error:
            # Harnesses recognize this code and shorten their history.
            return _refusal(400, str(error), "messages", "context_length_exceeded")
        except Exception as error:
            self.failure = self.failure or error
            return _refusal(500, f"the policy can't be sampled: {error}")
        if answer is None:
            return Response(status_code=499)
        if chat.stream:
            events = answer.events(chat.stream_usage)
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(answer.body())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _until_disconnect(self, request: Request, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None if the harness disconnects first, which cancels it."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        disconnect = asyncio.ensure_future(_disconnected(request))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        except asyncio.CancelledError:
            if task.cancelled():
                return None  # the rollout has ended
            raise
        finally:
            task.cancel()
            disconnect.cancel()
            self._tasks.discard(task)

    async def _turn(self, request: wire.ChatRequest) -> wire.ChatAnswer:
        prompt = self._prompt(request)
        kwargs = self._setup.sampling_kwargs
        limits = [n for n in (request.max_tokens, kwargs.get("max_tokens")) if n is not None]
        settings = kwargs | {"stop": [*(self._format.stop or ()), *request.stop] or None}
        if limits:
            settings["max_tokens"] = min(limits)
        sample = await self._setup.sampler.sample(prompt, **settings)
        reply = self._ids.assign(self._format.parse(prompt, sample.tokens, request.tools))
        turn = _Turn(request, reply.as_message(), Call.of(prompt, sample))
        self._turns.append(turn)
        return wire.ChatAnswer(
            id=f"chatcmpl-{len(self._turns)}",
            created=int(time.time()),
            model=request.model,
            message=turn.message,
            truncated=turn.call.truncated,
            prompt_tokens=len(prompt),
            completion_tokens=len(sample.tokens),
        )

    def _prompt(self, request: wire.ChatRequest) -> list[int]:
        """The longest turn that the request continues plus the new messages, or all rendered."""
        continued = [turn for turn in self._turns if turn.is_continued_by(request)]
        if continued:
            turn = max(continued, key=lambda turn: len(turn.request.messages))
            new = request.messages[len(turn.request.messages) + 1 :]
            call = turn.call
            extended = self._format.extend(call.prompt, call.tokens, new, request.tools)
            if extended is not None:
                return extended
        return self._format.render(request.messages, request.tools)


@dataclass(frozen=True, slots=True)
class _Turn:
    request: wire.ChatRequest
    message: Message
    call: Call

    def is_continued_by(self, request: wire.ChatRequest) -> bool:
        """Whether a request adds to this turn's messages and answer."""
        history = [*self.request.messages, self.message]
        return (
            len(request.messages) > len(history)
            and request.tools == self.request.tools
            and all(
                wire.comparable(old) == wire.comparable(new)
                for old, new in zip(history, request.messages, strict=False)
            )
        )


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> Response:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = wire.error_body(message, kind, param, code)
    # The client must not retry: the run retries the whole completion.
    return JSONResponse(body, status, headers={"x-should-retry": "false"})
