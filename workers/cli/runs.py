"""Queries about runs on a Temporal server: the list, the status and the end of a run.

Owns the text of how a run ended, and how a run on a server is matched to a folder. Doesn't own what
a run does (workflows/run/train_run.py).
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from everburn.records.commands import ending_of
from everburn.records.ids import RunRef
from everburn.records.run_folder import find_owner, find_server
from everburn.records.store import ArtifactStore
from workers.connection import Server
from workers.errors import BadInputError, UserError
from workflows.messages import RolloutsFailed, Status, StopRequest

if TYPE_CHECKING:
    from temporalio.client import (
        Client,
        WorkflowExecution,
        WorkflowExecutionDescription,
        WorkflowFailureError,
    )

QUERY_TIMEOUT = timedelta(seconds=10)
LISTED = 50
STARTED_MEMO = "everburn_started"
"""When a run was started. Each execution after continue-as-new has its own start time, and the
server may have deleted the first execution."""


@dataclass(frozen=True)
class Run:
    """A run as the server lists it. state: `running`, `completed`, `failed`, ... started: of its
    present incarnation, or of its last execution if the memo is missing."""

    id: str
    state: str
    started: datetime
    ended: datetime | None
    step: int | None
    reward: float | None

    @property
    def open(self) -> bool:
        return self.ended is None

    @classmethod
    async def of(cls, execution: "WorkflowExecution") -> "Run":
        from activities.search_attributes import REWARD, STEP

        noted = await execution.memo_value(STARTED_MEMO, None, type_hint=datetime)
        attributes = execution.typed_search_attributes
        return cls(
            id=execution.id,
            state="unknown" if execution.status is None else execution.status.name.lower(),
            started=min(noted or execution.start_time, execution.start_time),
            ended=execution.close_time,
            step=attributes.get(STEP),
            reward=attributes.get(REWARD),
        )


async def list_runs(client: "Client", limit: int = LISTED) -> list[Run]:
    """The open runs and those that ended last, newest start first."""
    found = await _matching(client, "WorkflowType = 'TrainRun'", limit)
    return sorted(found, key=lambda run: run.started, reverse=True)


async def open_runs(client: "Client") -> list[Run]:
    """The runs that haven't ended."""
    query = "WorkflowType = 'TrainRun' AND ExecutionStatus = 'Running'"
    return await _matching(client, query)


async def _matching(client: "Client", query: str, limit: int | None = None) -> list[Run]:
    """In the server's order: open runs, then by end time. Each run once, by its last execution."""
    found: dict[str, Run] = {}
    async for execution in client.list_workflows(query):
        if execution.id not in found:
            found[execution.id] = await Run.of(execution)
        if len(found) == limit:
            break
    return list(found.values())


async def find_run(server: Server, client: "Client", run_id: str | None) -> Run:
    """The run with that id; without an id, the open run, else the newest.

    Raises:
        UserError: there is none.
        BadInputError: no id is given, and several runs are open.
    """
    if run_id is None:
        runs = await open_runs(client)
        if len(runs) > 1:
            names = ", ".join(sorted(run.id for run in runs))
            raise BadInputError(f"{len(runs)} runs are open: give one of {names}")
        runs = runs or await list_runs(client)
        if not runs:
            start = f"everburn run CONFIG{server.everburn_options}"
            raise UserError(f"this server has no runs yet: start one with `{start}`")
        return runs[0]
    description = await describe(server, client, run_id)
    if description is None:
        listing = f"everburn list{server.everburn_options}"
        raise UserError(f"there is no run {run_id!r}: `{listing}` shows them")
    return await Run.of(description)


async def describe(
    server: Server, client: "Client", run_id: str
) -> "WorkflowExecutionDescription | None":
    """The last execution with that id; None if the server has none.

    Raises:
        UserError: the server doesn't answer.
    """
    from temporalio.service import RPCError, RPCStatusCode

    try:
        return await client.get_workflow_handle(run_id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise UserError(f"Temporal doesn't answer at {server.address}: {error.message}") from None


@dataclass(frozen=True)
class Known:
    """A server's last execution of a run id. open: it hasn't ended. own: it belongs to the present
    incarnation of the run in the folder; else to another run, or to an earlier incarnation."""

    open: bool
    own: bool


async def look_up(server: Server, run: RunRef) -> Known | None:
    """The last execution of a run's id; None if the server has none.

    Raises:
        UserError: the server doesn't answer.
    """
    from temporalio.client import WorkflowExecutionStatus

    found = await describe(server, await server.connect(), run.id)
    if found is None:
        return None
    owner = await asyncio.to_thread(find_owner, ArtifactStore.of(run))
    first = found.raw_description.workflow_execution_info.first_run_id
    return Known(
        open=found.status == WorkflowExecutionStatus.RUNNING,
        own=owner is not None and owner.first_execution_id == first,
    )


async def require_ended(run: RunRef, server: Server | None, *, ended: bool) -> None:
    """Return if it is certain that a run has ended: its folder, its server or the user (`ended`)
    says so. A server that doesn't know the run proves nothing.

    server: asked first, then the server recorded in the folder if the folder says no end.

    Raises:
        BadInputError: it is running, or may be.
    """
    store = ArtifactStore.of(run)
    says_so = ended or await asyncio.to_thread(ending_of, store) is not None
    servers = [] if server is None else [server]
    recorded = await asyncio.to_thread(find_server, store)
    if recorded is not None and not says_so:
        asked = {(each.address, each.namespace) for each in servers}
        if (recorded.address, recorded.namespace) not in asked:
            servers.append(Server(recorded.address, recorded.namespace))
    reasons = [] if server is not None else ["no local stack runs in this folder"]
    for each in servers:
        try:
            known = await look_up(each, run)
        except UserError as error:
            reasons.append(str(error))
            continue
        if known is not None and known.open:
            raise BadInputError(
                f"run {run.id} is running at {each.address}. Stop it first, with "
                f"`everburn stop {run.id}{each.everburn_options}`"
            )
        if known is not None and known.own:
            return
        reasons.append(f"the Temporal server at {each.address} doesn't know it")
    if not says_so:
        raise BadInputError(
            f"run {run.id} may be running: its folder doesn't say that it has ended, and "
            f"{'; '.join(reasons)}. Give its server with --address, or add --ended if you know "
            "that it has ended and that no server or worker will continue it"
        )


async def run_status(server: Server, client: "Client", run: Run) -> Status:
    """The run's own status, also after its end.

    Raises:
        UserError: no orchestrator worker answers.
    """
    from temporalio.client import WorkflowQueryFailedError
    from temporalio.service import RPCError

    from workflows.run.train_run import TrainRun

    try:
        return await client.get_workflow_handle(run.id).query(
            TrainRun.status, rpc_timeout=QUERY_TIMEOUT
        )
    except WorkflowQueryFailedError as error:
        raise UserError(f"run {run.id} ({run.state}) has no status: {error}") from None
    except RPCError as error:
        worker = f"everburn worker orchestrator{server.everburn_options}"
        start = "everburn dev" if server.of_folder else worker
        raise UserError(
            f"run {run.id} ({run.state}) doesn't answer: {error.message}. Its status comes from an "
            f"orchestrator worker: start one with `{start}`"
        ) from None


async def request_stop(client: "Client", run_id: str, drain: bool = False) -> None:
    """Ask an open run to stop gracefully."""
    from workflows.run.train_run import TrainRun

    handle = client.get_workflow_handle(run_id)
    await handle.signal(TrainRun.stop, StopRequest(drain=drain))


async def failure_of(client: "Client", run_id: str) -> str | None:
    """How an ended run failed; None if it didn't."""
    from temporalio.client import WorkflowFailureError

    from workflows.run.train_run import TrainRun

    try:
        await client.get_workflow_handle_for(TrainRun.run, run_id).result()
    except WorkflowFailureError as error:
        return describe_failure(error)
    return None


def describe_failure(error: "WorkflowFailureError") -> str:
    """The run's failure: its type and its message."""
    from temporalio.exceptions import (
        ApplicationError,
        CancelledError,
        FailureError,
        TerminatedError,
        TimeoutError,
    )

    match error.cause:
        case ApplicationError() as cause:
            return f"{cause.type}: {cause.message}"
        case CancelledError():
            return "it was cancelled"
        case TerminatedError() as cause:
            return f"it was terminated: {cause.message}"
        case TimeoutError():
            return "it ran into its execution timeout"
        case FailureError() as cause:
            return cause.message
        case cause:
            return str(cause)


def rollouts_failed(error: "WorkflowFailureError") -> RolloutsFailed | None:
    """The failed rollouts of a phase, if they ended the run."""
    from temporalio.exceptions import ApplicationError

    if not isinstance(error.cause, ApplicationError) or not error.cause.details:
        return None
    return RolloutsFailed.model_validate(error.cause.details[0])
