"""Faults on purpose: what a network, a gateway and a trainer do to a client on a bad day.

An ASGI wrapper around the whole application, present only with --enable-faults, so the normal
path knows nothing of it. Owns the plan of faults and how each is carried out; the routes to plan
them are in `emulator/http/admin.py`.
"""

import asyncio
import dataclasses
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everburn.emulator.errors import EmulatorError, InvalidInput
from everburn.emulator.http import wire
from everburn.emulator.service import Emulator
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
    for promotions, `hot_load_status` for GET hot_load. preempt_job takes the operations of a
    dedicated job, and the kinds of hotload take hot_load."""
    kind: FaultKind
    status: int = 503
    """Of kind status: what is answered."""
    message: str = ""
    """Of kind status: added to the error's text."""
    retry_after: int | None = None
    """Of kind status: seconds, as the answer's Retry-After header."""
    seconds: float = 1.0
    """Of kind delay: how long the request waits before it is applied."""
    applied: bool = False
    """Of kinds drop and status: whether the request takes effect before it is answered wrongly."""
    after: int = 0
    """Matching requests to let pass first."""
    count: int = 1
    """Matching requests to hit after that."""

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
"""Where the routes of emulator/http/admin.py are: what looks at an operation is no request of
it."""
ARRIVALS = 64
"""Requests of an operation whose times are kept."""


class FaultPlan:
    """The faults that are still to come, and when requests came."""

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
        """When the last requests of an operation came, in seconds of a clock that only rises."""
        return list(self._arrivals[operation])

    def take(self, operation: str) -> list[Fault]:
        """The faults that hit a request of `operation`, each used up by one."""
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
    """The application, with its planned faults."""

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
            try:
                if await self._inject(fault, raw, scope, receive, send):
                    return
            except EmulatorError as error:  # what it was aimed at is gone
                await wire.refuse(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _inject(
        self, fault: Fault, raw: bytes, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Carry out a fault; returns whether the request has been answered by it."""
        if fault.kind == "delay":
            await asyncio.sleep(fault.seconds)
        elif fault.kind == "expire_session":
            self._emulator.expire(self._session_id(wire.decode(raw)))
        elif fault.kind == "wipe_gradients":
            model = self._emulator.sessions.model(wire.text(wire.decode(raw), "model_id"))
            await self._emulator.compute(operations.at_once(model.engine.wipe_gradients))
        elif fault.kind == "stale_weights":
            self._emulator.sessions.model(wire.text(wire.decode(raw), "model_id")).stale = True
        elif fault.kind == "malformed":
            await wire.reply(b'{"type": "nonsense", "surprise": [')(scope, receive, send)
            return True
        elif fault.kind == "preempt_job":
            job_id = _job_of(scope)
            self._emulator.managed.interrupt_job(job_id, "JOB_STATE_PREEMPTED", "preempted")
        elif fault.kind == "hotload_error":
            self._emulator.managed.outcomes.append("error")
        elif fault.kind == "hotload_stuck":
            self._emulator.managed.outcomes.append("stuck")
        else:
            if fault.applied:
                await self._app(scope, receive, _discard)
            await (_drop(send) if fault.kind == "drop" else _refuse(fault, scope, receive, send))
            return True
        return False

    def _session_id(self, body: Mapping[str, Any]) -> str:
        if "session_id" in body:
            return wire.text(body, "session_id")
        if "model_id" in body:
            return self._emulator.sessions.model(wire.text(body, "model_id")).session.session_id
        return wire.text(body, "request_id").partition(".")[0]


class InjectedFault(EmulatorError):
    """Only in the body of a status fault."""

    code = "INJECTED_FAULT"


def _operation(scope: Scope) -> str:
    last: str = scope["path"].rpartition("/")[2]
    if last.endswith(":promote"):
        return "promote"
    if last == "completions":
        return "sample"
    return "hot_load_status" if last == "hot_load" and scope["method"] == "GET" else last


def _job_of(scope: Scope) -> str:
    """The dedicated job whose trainer a request is for. Raises InvalidInput."""
    _, found, rest = scope["path"].partition("/training/v1/rlorTrainerJobs/")
    if not found:
        raise InvalidInput(f"{scope['path']} is no request to a trainer job")
    return str(rest.split("/")[1])


async def _refuse(fault: Fault, scope: Scope, receive: Receive, send: Send) -> None:
    text = f"injected fault: {fault.operation} answers {fault.status} {fault.message}"
    response = wire.refuse(InjectedFault(text.rstrip()))
    response.status_code = fault.status
    if fault.retry_after is not None:
        response.headers["retry-after"] = str(fault.retry_after)
    await response(scope, receive, send)


async def _drop(send: Send) -> None:
    """Promise a body and don't send it: the server then closes the connection."""
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]}
    )


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
    """A receive channel that gives the body once more, then goes on with the real one."""
    body: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

    async def replay() -> Message:
        return body.pop() if body else await receive()

    return replay
