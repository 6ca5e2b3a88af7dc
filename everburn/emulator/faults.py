"""Fault injection: failures of the network, the gateway and the trainer, on request.

An ASGI middleware around the whole application, present only with --enable-faults. Owns planned
faults and how each is injected. Doesn't own the routes that plan them (http/admin.py).
"""

import asyncio
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everburn.emulator.errors import EmulatorError, InvalidInput
from everburn.emulator.http import wire
from everburn.emulator.service import Emulator
from everburn.emulator.sessions import Model
from everburn.emulator.training import operations

FaultKind = Literal[
    "drop",
    "status",
    "malformed",
    "delay",
    "expire_session",
    "wipe_gradients",
    "stale_weights",
    "preempt_job",
    "hotload_error",
    "hotload_stuck",
]


@dataclass(slots=True, kw_only=True)
class Fault:
    """One planned fault, for requests of one operation."""

    operation: str
    """Last part of the path: optim_step, retrieve_future, ...; `sample` for completions, `promote`
    for promotions, `hot_load_status` for GET hot_load. preempt_job needs an operation of a
    dedicated job, the hotload kinds need hot_load."""
    kind: FaultKind
    status: int = 503
    message: str = ""
    """For kind status: appended to the error's text."""
    retry_after: int | None = None
    """For kind status: the Retry-After header, in seconds."""
    seconds: float = 1.0
    """For kind delay: time before the request is handled."""
    applied: bool = False
    """For kinds drop, status and malformed: handle the request before answering wrongly."""
    after: int = 0
    """Number of matching requests to let pass first."""
    count: int = 1
    """Number of matching requests to hit after those."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> "Fault":
        """Raises InvalidInput."""
        if unknown := sorted(set(body) - {field.name for field in dataclasses.fields(cls)}):
            raise InvalidInput(f"a fault has no {', '.join(unknown)}")
        if body.get("kind") not in get_args(FaultKind):
            raise InvalidInput(f"kind must be one of {', '.join(get_args(FaultKind))}")
        return cls(
            operation=wire.text(body, "operation"),
            kind=body["kind"],
            status=wire.integer(body, "status", 503),
            message=str(body.get("message", "")),
            retry_after=wire.integer(body, "retry_after") if "retry_after" in body else None,
            seconds=wire.number(body, "seconds", 1.0),
            applied=wire.flag(body, "applied", False),
            after=wire.integer(body, "after", 0),
            count=wire.integer(body, "count", 1),
        )


ADMIN = "/emulator"
"""Prefix of the routes of http/admin.py, which faults never hit."""
ARRIVALS = 64
"""Arrival times kept per operation."""


class FaultPlan:
    """Pending faults, and the arrival times of requests."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._arrivals: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=ARRIVALS))

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def clear(self) -> None:
        self._faults.clear()

    def pending(self) -> list[Fault]:
        return list(self._faults)

    def arrivals(self, operation: str) -> list[float]:
        """Monotonic arrival times of the last requests of an operation."""
        return list(self._arrivals[operation])

    def take(self, operation: str) -> list[Fault]:
        """Record a request; returns the faults that hit it and counts them down."""
        self._arrivals[operation].append(time.monotonic())
        hits = []
        for fault in self._faults:
            if fault.operation != operation:
                continue
            if fault.after:
                fault.after -= 1
            else:
                fault.count -= 1
                hits.append(fault)
        self._faults = [fault for fault in self._faults if fault.count]
        return hits


class FaultyApp:
    """The application with planned faults."""

    def __init__(self, app: ASGIApp, emulator: Emulator, plan: FaultPlan) -> None:
        self._app = app
        self._emulator = emulator
        self._plan = plan

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = scope["type"] == "http" and not scope["path"].startswith(f"{ADMIN}/")
        hits = self._plan.take(_operation(scope)) if served else []
        if not hits:
            await self._app(scope, receive, send)
            return
        raw = await _read(receive)
        receive = _replay(raw, receive)
        for fault in hits:
            if fault.kind in ("drop", "status", "malformed"):
                await self._answer(fault, scope, receive, send)
                return
            try:
                await self._disturb(fault, scope, raw)
            except EmulatorError as error:  # the fault's target is gone
                await wire.refuse(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _answer(self, fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request in place of the application."""
        if fault.applied:
            await self._app(scope, receive, _discard)
        match fault.kind:
            case "drop":
                # Promise a body and send none: the server then closes the connection.
                headers = [(b"content-length", b"1")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            case "malformed":
                await wire.reply(b'{"type": "nonsense", "surprise": [')(scope, receive, send)
            case _:
                await _refusal(fault)(scope, receive, send)

    async def _disturb(self, fault: Fault, scope: Scope, raw: bytes) -> None:
        """Delay the request or damage the emulator's state before the application handles it."""
        emulator = self._emulator
        match fault.kind:
            case "delay":
                await asyncio.sleep(fault.seconds)
            case "expire_session":
                emulator.expire(self._session_id(wire.decode(raw)))
            case "wipe_gradients":
                clear = self._model(wire.decode(raw)).engine.clear_gradients
                await emulator.compute(operations.single_slice(clear))
            case "stale_weights":
                self._model(wire.decode(raw)).stale = True
            case "preempt_job":
                emulator.managed.interrupt_job(_job_of(scope), "JOB_STATE_PREEMPTED", "preempted")
            case "hotload_error":
                emulator.managed.hotload_faults.append("error")
            case "hotload_stuck":
                emulator.managed.hotload_faults.append("stuck")

    def _model(self, body: Mapping[str, Any]) -> Model:
        return self._emulator.sessions.model(wire.text(body, "model_id"))

    def _session_id(self, body: Mapping[str, Any]) -> str:
        if "session_id" in body:
            return wire.text(body, "session_id")
        if "model_id" in body:
            return self._model(body).session.session_id
        return wire.text(body, "request_id").partition(".")[0]


class InjectedFault(EmulatorError):
    """The body of a status fault."""

    code = "INJECTED_FAULT"


def _operation(scope: Scope) -> str:
    last: str = scope["path"].rpartition("/")[2]
    if last.endswith(":promote"):
        return "promote"
    if last == "completions":
        return "sample"
    return "hot_load_status" if last == "hot_load" and scope["method"] == "GET" else last


def _job_of(scope: Scope) -> str:
    _, prefix, rest = scope["path"].partition("/training/v1/rlorTrainerJobs/")
    if not prefix:
        raise InvalidInput(f"{scope['path']} is not a request to a trainer job")
    return str(rest.split("/")[1])


def _refusal(fault: Fault) -> Response:
    text = f"injected fault: {fault.operation} answers {fault.status} {fault.message}"
    response = wire.refuse(InjectedFault(text.rstrip()))
    response.status_code = fault.status
    if fault.retry_after is not None:
        response.headers["retry-after"] = str(fault.retry_after)
    return response


async def _discard(message: Message) -> None:
    return None


async def _read(receive: Receive) -> bytes:
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replay(raw: bytes, receive: Receive) -> Receive:
    """A receive channel that repeats the body, then continues with `receive`."""
    body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return body.pop() if body else await receive()

    return replay
