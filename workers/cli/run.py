"""`everburn run`: start or follow a run until it ends.

Owns what an interrupt does (the first asks the run to stop, the second leaves it) and the lines at
the end. Doesn't own the stack (workers/stack/attachment.py) or the run
(workflows/run/train_run.py), which continues without this process.
"""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console

from everburn.records.ids import RunRef
from everburn.records.store import StoreError
from workers.cli.progress import Progress, progress_on
from workers.cli.report import Comparison, duration, metrics_table
from workers.cli.run_file import RunFile, check_run_id, is_local, link_latest, new_run_id
from workers.cli.runs import (
    QUERY_TIMEOUT,
    STARTED_MEMO,
    describe,
    describe_failure,
    open_runs,
    request_stop,
    rollouts_failed,
)
from workers.cli.stale_code import stale_code
from workers.cli.terminal import console, print_line, say
from workers.connection import DEFAULT_NAMESPACE, Server
from workers.environment import as_typed
from workers.errors import BadInputError, UserError
from workers.signals import interrupts_call, sigterm_interrupts
from workers.stack.ports import PortWishes
from workflows.messages import RolloutsFailed, RunResult, Status
from workflows.queues import ORCHESTRATOR_QUEUE

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHandle

    from workers.stack.attachment import Stack
    from workers.stack.folder import StackState
    from workflows.run.state import RunState
    from workflows.run.train_run import TrainRun

    Handle = WorkflowHandle[TrainRun, RunResult]

REFRESH = 1.0
UNREACHABLE_LIMIT = 60.0
"""Seconds without an answer from the server after which the command gives up."""
SILENCE_LIMIT = 30.0
"""Seconds without a first status after which there is probably no orchestrator worker."""

News = Callable[[], list[str]]
Epilogue = Callable[[RunResult | None, RolloutsFailed | None], list[str]]
"""The last lines about a run, from its result or from the rollouts that failed it."""
Then = Callable[[Server, "Stack | None"], int]


class RunLeft(Exception):
    """The user left the run while it continues."""

    def __init__(self, run_id: str, number: signal.Signals) -> None:
        super().__init__(run_id)
        self.run_id = run_id
        self.exit_code = 128 + number

    def description(self, server: Server, stack: "Stack | None") -> list[str]:
        """What still runs, and how to inspect and end it."""
        run, everburn, temporal = self.run_id, as_typed("everburn"), as_typed("temporal")
        lines = [
            f"left run {run}: it was asked to stop; until it has stopped, it continues and keeps "
            "its trainer session",
            f"  see its status:   {everburn} status {run}{server.everburn_options}",
            f"  end it sooner:    {temporal} workflow cancel --workflow-id {run} {server.options}",
        ]
        return lines if stack is None else lines + stack.leftover()


@dataclass(frozen=True)
class Launch:
    """A run to start or follow. run_id: None for a new id."""

    file: RunFile
    run_id: str | None
    server: Server
    news: News = list
    """Returns lines to print while the run continues."""
    state: "RunState | None" = None
    """The state from which the run starts: of a resumed run, or a fork."""
    resumes: bool = False
    """True if `run_id` may belong to a run that has ended."""
    follows: bool = False
    """True if the run has started already."""
    epilogue: Epilogue | None = None
    """If given, it and `news` report the checkpoints."""
    used_stack: "StackState | None" = None
    """The stack that executes the run, if it ran before this command."""


def attach_or_connect(
    address: str | None,
    then: Then,
    namespace: str = DEFAULT_NAMESPACE,
    ports: PortWishes | None = None,
) -> NoReturn:
    """Call `then` with the server at `address`, else with this folder's stack, which is started if
    necessary; exit with the code that it returns."""
    from workers.stack.attachment import Stack

    if address is not None:
        raise typer.Exit(then(Server(address, namespace), None))
    with (
        sigterm_interrupts(),
        Stack.attach(Path.cwd(), ports or PortWishes(), say) as stack,
    ):
        code = then(Server.of_stack(stack.state), stack)
    raise typer.Exit(code)


async def start_and_follow(order: Launch, console: Console) -> int:
    """Start the run unless it is only followed, and wait for its end; returns the exit code.

    Raises:
        BadInputError: a run of that id exists.
        UserError: Temporal can't be reached.
        RunLeft: at the second interrupt.
    """
    client = await order.server.connect()
    if order.used_stack is not None and not order.follows:
        note = await stale_code(order.file.config, order.used_stack, Path.cwd(), client)
        if note is not None:
            print_line(console, note)
    run_id, handle = await start_run(order, client)
    print_line(console, f"run {run_id}")
    try:
        link_latest(order.file.config.store, run_id)
    except OSError as error:
        print_line(console, f"`latest` doesn't name this run: {error}")
    if (page := order.server.page(run_id)) is not None:
        print_line(console, page)
    for other in await open_runs(client):
        if other.id != run_id:
            stop = f"everburn stop {other.id}{order.server.everburn_options}"
            print_line(console, f"run {other.id} is running too: `{stop}` ends it")
    with progress_on(console) as progress:
        watch = Watch(client, handle, progress, order)
        ending = await watch.until_end()
    return _print_end(order, console, run_id, ending, watch.status)


def run_to_end(order: Launch, stack: "Stack | None" = None) -> int:
    """Start or follow a run; if the user leaves it, print what still runs. The exit code."""
    if stack is not None:
        # The present state: workers may have been restarted since the stack started.
        used = None if stack.started_here else stack.folder.find() or stack.state
        news = order.news
        order = replace(order, used_stack=used, news=lambda: stack.news() + news())
    try:
        return asyncio.run(start_and_follow(order, console))
    except RunLeft as left:
        if stack is not None:
            stack.stay()
        for line in left.description(order.server, stack):
            say(line)
        return left.exit_code


async def start_run(order: Launch, client: "Client") -> "tuple[str, Handle]":
    """Start the run unless it is only followed; returns its id and a handle.

    Raises:
        BadInputError: a run of that id exists.
    """
    from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
    from temporalio.exceptions import WorkflowAlreadyStartedError

    from workflows.run.train_run import TrainRun

    config = order.file.config
    if order.run_id is not None:
        run_id = check_run_id(order.run_id)
    else:
        run_id = new_run_id(order.file.name, config.store, datetime.now())
    if order.follows:
        return run_id, client.get_workflow_handle_for(TrainRun.run, run_id)
    try:
        handle = await client.start_workflow(
            TrainRun.run,
            args=[order.file.values, *([order.state] if order.state is not None else [])],
            id=run_id,
            task_queue=ORCHESTRATOR_QUEUE,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE
            if order.resumes
            else WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            static_summary=f"{config.rollout.name} on {config.base_model}",
            memo={STARTED_MEMO: datetime.now(UTC)},
        )
    except WorkflowAlreadyStartedError:
        raise _taken(order.server, run_id) from None
    return run_id, handle


async def check_id_is_free(server: Server, run_id: str) -> None:
    """Raises BadInputError: the server has or had a run of that id."""
    if await describe(server, await server.connect(), run_id) is not None:
        raise _taken(server, run_id)


def _taken(server: Server, run_id: str) -> BadInputError:
    return BadInputError(
        f"there is a run {run_id!r} already: choose another --id, or inspect it with "
        f"`everburn status {run_id}{server.everburn_options}`"
    )


@dataclass(frozen=True)
class Ending:
    """A run's result, or its failure."""

    result: RunResult | None
    failure: str | None = None
    rollouts: RolloutsFailed | None = None
    """The failed rollouts, if they ended the run."""


class Watch:
    """Follows one run, and sends it a stop request at the first interrupt."""

    def __init__(
        self, client: "Client", handle: "Handle", progress: Progress, order: Launch
    ) -> None:
        self.status: Status | None = None
        self._reported: set[str] = set()
        self._began = time.monotonic()
        self._client = client
        self._handle = handle
        self._progress = progress
        self._order = order
        self._interrupts: list[signal.Signals] = []
        self._interrupted = asyncio.Event()

    async def until_end(self) -> Ending:
        """Raises RunLeft at the second interrupt."""
        ending = asyncio.create_task(self._ending())
        watching = asyncio.create_task(self._watch())
        leaving = asyncio.create_task(self._handle_interrupts())
        tasks = {ending, watching, leaving}
        with interrupts_call(self._on_interrupt):
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {ending}:
                    await task
                found = await ending
                await self._refresh()
                return found
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _on_interrupt(self, number: signal.Signals) -> None:
        self._interrupts.append(number)
        self._interrupted.set()

    async def _handle_interrupts(self) -> None:
        await self._next_interrupt()
        self._progress.say(
            "stopping gracefully: the run finishes its step, saves and evaluates; "
            "interrupt again to leave at once"
        )
        asking = asyncio.create_task(request_stop(self._client, self._handle.id))
        await self._next_interrupt()
        asking.cancel()
        raise RunLeft(self._handle.id, self._interrupts[-1])

    async def _next_interrupt(self) -> None:
        await self._interrupted.wait()
        self._interrupted.clear()

    async def _ending(self) -> Ending:
        from temporalio.client import WorkflowFailureError
        from temporalio.service import RPCError

        while True:
            try:
                return Ending(await self._handle.result())
            except WorkflowFailureError as error:
                return Ending(None, describe_failure(error), rollouts_failed(error))
            except RPCError:
                await self._server_answers()

    async def _server_answers(self) -> None:
        """Wait for the server, which may be restarting."""
        from temporalio.service import RPCError

        deadline = asyncio.get_running_loop().time() + UNREACHABLE_LIMIT
        while True:
            try:
                await self._handle.describe()
                return
            except RPCError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise UserError(
                        f"Temporal hasn't answered for {UNREACHABLE_LIMIT:.0f} s: {error.message}. "
                        f"Run {self._handle.id} continues when server and workers are back"
                    ) from None
            await asyncio.sleep(REFRESH)

    async def _watch(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH)

    async def _refresh(self) -> None:
        from temporalio.client import WorkflowQueryFailedError
        from temporalio.service import RPCError

        from workflows.run.train_run import TrainRun

        for line in self._order.news():
            self._progress.say(line)
        try:
            self.status = await self._handle.query(TrainRun.status, rpc_timeout=QUERY_TIMEOUT)
        except WorkflowQueryFailedError:
            return  # no status yet
        except RPCError:
            self._report_silence()
            return  # no worker at the moment: keep the last status
        for saved in self.status.saved if self._order.epilogue is None else []:
            if saved not in self._reported:
                self._reported.add(saved)
                self._progress.say(f"checkpoint of {saved}")
        if self.status.error is not None and self.status.error not in self._reported:
            self._reported.add(self.status.error)
            self._progress.say(f"error: {self.status.error}")
        self._progress.show(self.status)

    def _report_silence(self) -> None:
        server = self._order.server
        text = (
            f"run {self._handle.id} has sent no status for {SILENCE_LIMIT:.0f} s: no orchestrator "
            f"worker answers at {server.address}: start one with "
            f"`everburn worker orchestrator{server.everburn_options}`"
        )
        silent = self.status is None and time.monotonic() - self._began > SILENCE_LIMIT
        if silent and text not in self._reported:
            self._reported.add(text)
            self._progress.say(text)


def _print_end(
    order: Launch, console: Console, run_id: str, ending: Ending, status: Status | None
) -> int:
    """Print how the run ended; returns the exit code."""
    run = RunRef(store=order.file.config.store, id=run_id)
    result = ending.result
    if result is not None:
        _print_result(console, run, result, order.epilogue is None)
    else:
        print_line(console, f"run {run_id} failed: {ending.failure}")
        show = f"{as_typed('temporal')} workflow show --workflow-id {run_id}"
        print_line(console, f"its history: {show} {order.server.options}")
    for note in status.notes if status is not None else []:
        print_line(console, f"note: {note}")
    for line in order.epilogue(result, ending.rollouts) if order.epilogue is not None else []:
        print_line(console, line)
    print_line(console, f"run folder: {_shown(run)}")
    return 0 if result is not None else 1


def _print_result(console: Console, run: RunRef, result: RunResult, checkpoint: bool) -> None:
    try:
        comparison = Comparison.of(run)
    except (StoreError, ImportError, ValueError) as error:
        # The workers could read and write them, so the run itself is fine.
        comparison = Comparison(None, None)
        print_line(console, f"the evaluations can't be read from here: {error}")
    table = comparison.table() or metrics_table(result.evaluations)
    if table is not None:
        console.print()
        console.print(table)
    if (conditions := comparison.conditions()) is not None:
        print_line(console, f"({conditions})")
    console.print()
    verb = "stopped" if result.stopped else "trained"
    took = duration(result.seconds)
    print_line(console, f"{verb} after {result.steps} steps on {result.rows} rows in {took}")
    if result.recovered is not None:
        print_line(console, f"recovered: {result.recovered.text}")
    if checkpoint and result.checkpoint is not None:
        print_line(console, f"checkpoint: {result.checkpoint}")
    if result.model is not None:
        print_line(console, f"model: {result.model}")


def _shown(run: RunRef) -> str:
    """The run's folder, relative to the current folder if it is inside."""
    if not is_local(run.folder):
        return run.folder
    folder, here = Path(run.folder), Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
