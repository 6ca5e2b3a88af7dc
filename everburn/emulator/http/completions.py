"""The inference route: token ids in, one server-sent event out.

The SDK reads the whole stream before parsing it, so a finished completion is sent as a single
event. A client that disconnects cancels its request, so that an abandoned completion doesn't keep
decoding next to its own retry. Uses ASGI directly: this route runs hundreds of times a second.
"""

import asyncio
import re
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everburn.emulator.errors import EmulatorError, InvalidInput, NotFound, SessionExpired
from everburn.emulator.http import wire
from everburn.emulator.sampling.distribution import SamplingParams
from everburn.emulator.sampling.sampler import Completion, Ticket
from everburn.emulator.service import Emulator, Target
from everburn.emulator.training.checkpoints import CheckpointRef

_FIELDS = {
    *("model", "prompt", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop"),
    *("stream", "logprobs", "echo", "raw_output", "perf_metrics_in_response"),
    *("include_routing_matrix", "prompt_cache_key"),
}
"""Some have no effect: token ids and logprobs are always in the response."""

_CLOSE = {"connection": "close"}
"""The SDK's HTTP pool compares every pair of its idle connections for each request. With 64 of them
that takes longer (6 ms of the client's CPU, measured) than to open a new connection.
"""

_IN_SESSION = re.compile(
    r"accounts/(?P<account>[^/]+)/trainingSessions/(?P<session>ts-[^/]+)(/checkpoints/(?P<ref>.+))?"
)
_STANDALONE = re.compile(
    r"accounts/(?P<account>[^/]+)/trainingSamplers/(checkpoints/(?P<ref>.+)|(?P<base>.+))"
)


_DEPLOYMENT = re.compile(r"accounts/(?P<account>[^/]+)/deployments/(?P<deployment>[^/]+)")


class CompletionsRoute:
    """ASGI application of POST /inference/v1/completions."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._respond(Request(scope, receive), receive)
        except EmulatorError as error:
            response = wire.refuse(error)
        if response is not None:
            await response(scope, receive, send)

    async def _respond(self, request: Request, receive: Receive) -> Response | None:
        """The response; None if the client has disconnected."""
        body = await wire.read(request)
        prompt, params = parse_request(body)
        target = await self._resolve(wire.text(body, "model"))
        ticket = self._emulator.sample(target, prompt, params)
        completion = asyncio.wrap_future(ticket.completion)
        disconnected = asyncio.ensure_future(receive())
        either: set[asyncio.Future[Any]] = {completion, disconnected}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ticket.cancelled = completion.cancel()
            disconnected.cancel()
        self._emulator.completions["cancelled" if ticket.cancelled else "finished"] += 1
        if ticket.cancelled:
            return None
        return _response(body, ticket, completion.result())

    async def _resolve(self, model: str) -> Target:
        """The weights that a request's `model` names. Raises NotFound or NotReady."""
        emulator = self._emulator
        account = emulator.settings.account
        if match := _IN_SESSION.fullmatch(model):
            try:
                session = emulator.sessions.get(match["session"])
            except SessionExpired as error:
                raise NotFound(str(error)) from error
            if match["ref"] is None:
                bases = [trained.engine.base for trained in session.models.values()]
                if not bases:
                    raise NotFound(f"session {match['session']} has no model to sample from")
                return Target(bases[0], None)
            ref = CheckpointRef.parse(match["ref"], account=account)
            snapshot = emulator.sessions.snapshot(ref, match["session"])
            return Target(snapshot.base, snapshot)
        if match := _STANDALONE.fullmatch(model):
            if match["base"] is not None:
                return Target(await emulator.base(match["base"]), None)
            snapshot = emulator.sessions.snapshot(
                CheckpointRef.parse(match["ref"], account=account)
            )
            return Target(snapshot.base, snapshot)
        if match := _DEPLOYMENT.fullmatch(model):
            deployment = emulator.managed.ready_deployment(match["deployment"])
            export = deployment.served()
            if export is None:
                return Target(await emulator.base(deployment.request["baseModel"]), None)
            return Target(export.snapshot.base, export.snapshot)
        raise NotFound(f"unknown model {model!r}")


def parse_request(body: Mapping[str, Any]) -> tuple[list[int], SamplingParams]:
    """Prompt and parameters of a completions request. Raises InvalidInput that names the field."""
    if extra := sorted(set(body) - _FIELDS):
        # The service's words: the SDK recognizes them and retries without the field if it can.
        raise InvalidInput(f"Extra inputs are not permitted, field: '{extra[0]}'")
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InvalidInput("prompt must be a list of token ids")
    if wire.integer(body, "n", 1) != 1:
        raise InvalidInput("n must be 1: send one request per completion")
    params = SamplingParams(
        max_tokens=wire.integer(body, "max_tokens", 16),
        temperature=wire.number(body, "temperature", 1.0),
        top_p=wire.number(body, "top_p", 1.0),
        top_k=wire.integer(body, "top_k", 0),
        seed=wire.integer(body, "seed") if body.get("seed") is not None else None,
        stop=_stop(body.get("stop")),
        echo=wire.flag(body, "echo", False),
    )
    if params.max_tokens < 1:
        raise InvalidInput(f"max_tokens must be at least 1, not {params.max_tokens}")
    if not 0 <= params.temperature <= 100:
        raise InvalidInput(f"temperature must be in [0, 100], not {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise InvalidInput(f"top_p must be in (0, 1], not {params.top_p}")
    if params.top_k < 0:
        raise InvalidInput(f"top_k must be 0 (off) or above, not {params.top_k}")
    return prompt, params


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or []
    if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
        raise InvalidInput("stop must be a non-empty string or a list of them")
    return tuple(strings)


def _response(body: Mapping[str, Any], ticket: Ticket, completion: Completion) -> Response:
    payload = _payload(ticket, completion)
    if not body.get("stream"):
        return wire.reply(payload)
    event = b"data: " + wire.encode(payload) + b"\n\ndata: [DONE]\n\n"
    return Response(event, media_type="text/event-stream", headers=_CLOSE)


def _payload(ticket: Ticket, completion: Completion) -> dict[str, Any]:
    tokens, raw = completion.tokens, completion.logprobs
    sampling = completion.sampling_logprobs
    if ticket.params.echo:
        tokens = [*ticket.prompt, *tokens]
        raw = [*completion.prompt_logprobs, *raw]
        sampling = [*completion.prompt_logprobs, *sampling]
    content = [
        {"token_id": token, "logprob": logprob, "sampling_logprob": sampling_logprob}
        for token, logprob, sampling_logprob in zip(tokens, raw, sampling, strict=True)
    ]
    return {
        "id": f"cmpl-{uuid.uuid4().hex[:12]}",
        "object": "text_completion",
        "choices": [
            {
                "index": 0,
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "logprobs": {"content": content},
                "raw_output": {"completion_token_ids": tokens},
            }
        ],
        "usage": {
            "prompt_tokens": len(ticket.prompt),
            "completion_tokens": len(completion.tokens),
        },
    }
