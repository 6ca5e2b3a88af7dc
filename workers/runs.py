"""Runs on a Temporal server, as people ask about them: which there are, where one is, its end.

Owns the words for how a run ended, and by what a run on a server is that of a folder. Doesn't own
what a run does (workflows/train_run.py).
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from everburn.refs import RunRef
from everburn.run_folder import find_owner
from everburn.store import ArtifactStore
from workers.errors import UserError
from workers.server import Server
from workflows.messages import RolloutsFailed, Status, StopRequest

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowExecution, WorkflowFailureError

QUERY_TIMEOUT = timedelta(seconds=10)
LISTED = 50


@dataclass(frozen=True)
class Run:
    """A run as the server lists it. state: `running`, `completed`, `failed`, ..."""

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
    def of(cls, execution: "WorkflowExecution") -> "Run":
        from activities.search_attributes import REWARD, STEP

        attributes = execution.typed_search_attributes
        return cls(
            id=execution.id,
            state="unknown" if execution.status is None else execution.status.name.lower(),
            started=execution.start_time,
            ended=execution.close_time,
            step=attributes.get(STEP),
            reward=attributes.get(REWARD),
        )


async def list_runs(client: "Client", limit: int = LISTED) -> list[Run]:
    """The newest first; a run that continued as new is listed once."""
    found: dict[str, Run] = {}
    async for run in _matching(client, "WorkflowType = 'TrainRun'"):
        found.setdefault(run.id, run)
        if len(found) == limit:
            break
    return list(found.values())


async def open_runs(client: "Client") -> list[Run]:
    """Those that haven't ended: a run goes on by itself when server and workers are back."""
    query = "WorkflowType = 'TrainRun' AND ExecutionStatus = 'Running'"
    return [run async for run in _matching(client, query)]


async def _matching(client: "Client", query: str) -> AsyncIterator[Run]:
    async for execution in client.list_workflows(query):
        yield Run.of(execution)


async def find_run(client: "Client", run_id: str | None) -> Run:
    """The run of that id, or the newest.

    Raises:
        UserError: there is none.
    """
    from temporalio.service import RPCError, RPCStatusCode

    if run_id is None:
        runs = await list_runs(client, limit=1)
        if not runs:
            raise UserError("this server has no runs yet: start one with `everburn run CONFIG`")
        return runs[0]
    try:
        description = await client.get_workflow_handle(run_id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            raise UserError(f"there is no run {run_id!r}: `everburn list` shows them") from None
        raise
    return Run.of(description)


@dataclass(frozen=True)
class Known:
    """What a server has under the id of a run whose folder one has. open: whether it goes on. own:
    whether it is that run's present life; else another run, or one that has ended since."""

    open: bool
    own: bool


async def look_up(server: Server, run: RunRef) -> Known | None:
    """The last execution of a run's id; None where the server never had one, or has forgotten it.

    Raises:
        UserError: the server can't be asked.
    """
    from temporalio.client import WorkflowExecutionStatus
    from temporalio.service import RPCError, RPCStatusCode

    client = await server.connect()
    try:
        found = await client.get_workflow_handle(run.id).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise UserError(f"Temporal doesn't answer at {server.address}: {error.message}") from None
    owner = await asyncio.to_thread(find_owner, ArtifactStore.of(run))
    chain = found.raw_description.workflow_execution_info.first_run_id
    return Known(
        open=found.status == WorkflowExecutionStatus.RUNNING,
        own=owner is not None and owner.chain == chain,
    )


async def run_status(client: "Client", run: Run) -> Status:
    """Where a run is, from the run itself; also after its end.

    Raises:
        UserError: no orchestrator worker answers.
    """
    from temporalio.client import WorkflowQueryFailedError
    from temporalio.service import RPCError

    from workflows.train_run import TrainRun

    try:
        return await client.get_workflow_handle(run.id).query(
            TrainRun.status, rpc_timeout=QUERY_TIMEOUT
        )
    except WorkflowQueryFailedError as error:
        raise UserError(f"run {run.id} ({run.state}) can't say where it is: {error}") from None
    except RPCError as error:
        raise UserError(
            f"run {run.id} ({run.state}) doesn't answer: {error.message}. Its status comes from an "
            "orchestrator worker: start one with `everburn dev` or `everburn worker orchestrator`"
        ) from None


async def request_stop(client: "Client", run_id: str, drain: bool = False) -> None:
    """Ask an open run to stop gracefully."""
    from workflows.train_run import TrainRun

    handle = client.get_workflow_handle(run_id)
    await handle.signal(TrainRun.stop, StopRequest(drain=drain))


async def failure_of(client: "Client", run_id: str) -> str | None:
    """How an ended run failed, or None where it didn't."""
    from temporalio.client import WorkflowFailureError

    from workflows.train_run import TrainRun

    try:
        await client.get_workflow_handle_for(TrainRun.run, run_id).result()
    except WorkflowFailureError as error:
        return describe_failure(error)
    return None


def describe_failure(error: "WorkflowFailureError") -> str:
    """The run's failure in words: its type and its message."""
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
    """What failed of a phase's rollouts, where that ended the run."""
    from temporalio.exceptions import ApplicationError

    if not isinstance(error.cause, ApplicationError) or not error.cause.details:
        return None
    return RolloutsFailed.model_validate(error.cause.details[0])
