"""The supervisor of a local stack: starts its services, restarts what dies, stops them in order.

The supervisor is a separate process, started by the first command that needs the stack
(attachment.py); it lives while a command is attached. Each attached command holds a shared file
lock, which the kernel releases when the command ends, even by SIGKILL. So no service outlives its
users, on Linux and macOS, and neither Temporal's binary nor a worker needs to know its parent.
(PR_SET_PDEATHSIG is Linux only; Temporal's binary can't watch an inherited pipe, which would also
close with the first of several users.)

The supervisor leads its own session: Ctrl-C in the terminal reaches the command but not the
services, which a graceful stop still needs. Signals: SIGTERM stops the stack; SIGUSR1 keeps it up
without attached commands, and SIGUSR2 reverts that.

If the supervisor itself is killed, the attached command ends its services, else the next command
that starts a stack here does.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from everburn.trainers.backends import EMULATOR_URL_ENV
from workers.connection import DEFAULT_NAMESPACE
from workers.environment import BUILD_ID_ENV
from workers.exits import leave
from workers.stack.folder import (
    FolderLock,
    ProcessRecord,
    StackFolder,
    StackPorts,
    StackState,
    end_processes,
)
from workers.stack.temporal_server import start_command
from workflows.queues import ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE, TRAINER_QUEUE

POLL = 0.2
START_TIMEOUT = 120.0
"""Seconds for a service to answer: importing torch on a busy machine is slow."""
ASK_TIMEOUT = 5.0
"""Seconds for one answer. A connection to a server that doesn't listen yet may never answer (on an
ephemeral port, a client can even connect to itself)."""
STOP_TIMEOUT = 25.0
"""Seconds for a service to end: more than the workers' grace period and the end of user code."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds before a dead service is restarted; doubled each time until it stays up STAYED_UP."""
STAYED_UP = 60.0


class StackFailure(Exception):
    """The stack can't start; the message says why and which log to read."""


class StackOrder(StackPorts):
    """The supervisor's input, from the command that starts it. binary: the Temporal server."""

    root: Path
    binary: Path


@dataclass(frozen=True)
class Service:
    """A process of the stack. stop_rank: services of lower rank stop first, while the services that
    they need are still up."""

    name: str
    command: list[str]
    stop_rank: int
    environment: dict[str, str] = field(default_factory=dict)


def services_of(order: StackOrder, folder: StackFolder) -> tuple[list[Service], list[Service]]:
    """The servers, and the workers that need them."""
    environment = {
        EMULATOR_URL_ENV: order.emulator,
        # The SDK sends telemetry to the training server; the emulator ignores it.
        "TINKER_TELEMETRY": os.environ.get("TINKER_TELEMETRY", "0"),
        # Unversioned: a local stack has no current build.
        BUILD_ID_ENV: "",
    }
    temporal = start_command(order.binary, folder.database, order.temporal_port, order.ui_port)
    emulator = ["--port", str(order.emulator_port), "--home", str(folder.emulator_home)]

    def worker(role: str, stop_rank: int) -> Service:
        command = everburn_command(
            "worker", role, "--address", order.temporal, "--namespace", DEFAULT_NAMESPACE
        )
        return Service(role, command, stop_rank, environment)

    servers = [
        Service("temporal", temporal, stop_rank=2),
        Service("emulator", everburn_command("emulator", *emulator), stop_rank=2),
    ]
    return servers, [worker("orchestrator", 1), worker("rollout", 0), worker("trainer", 0)]


def everburn_command(*arguments: str) -> list[str]:
    """Everburn's command line under this interpreter. -P: don't import a `workers` folder of the
    user from the current folder."""
    return [sys.executable, "-P", "-m", "workers.cli.app", *arguments]


class Supervisor:
    def __init__(self, order: StackOrder, folder: StackFolder) -> None:
        self._folder = folder
        self._servers, self._workers = services_of(order, folder)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten = False
        self._state = StackState(
            supervisor=ProcessRecord.of(os.getpid()),
            **order.model_dump(include=set(StackPorts.model_fields)),
        )

    async def run(self) -> int:
        """Keep the stack up until no command is attached; returns the exit code."""
        self._folder.write(self._state)  # if that fails, nothing has been started yet
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._finish)
        loop.add_signal_handler(signal.SIGUSR1, self._set_stays, True)
        loop.add_signal_handler(signal.SIGUSR2, self._set_stays, False)
        watching = self._guarded(self._watch_users())
        starting = self._guarded(self._start_all())
        try:
            await self._end
            self._state.phase = "stopping"
        except Exception as failure:
            self._state.phase = "failed"
            self._state.failure = str(failure) or type(failure).__name__
            self._say(self._state.failure)
        finally:
            self._write()
            starting.cancel()
            await self._stop_all()
            watching.cancel()
        if self._state.failure is not None:
            return 1
        self._folder.forget()
        return 0

    # Starting

    async def _start_all(self) -> None:
        for service in self._servers:
            self._keep(service)
        temporal, emulator = self._servers
        await self._answers(temporal, self._temporal_answers)
        for service in self._workers:
            self._keep(service)
        await self._answers(emulator, self._emulator_answers)
        for service, queue in zip(
            self._workers, (ORCHESTRATOR_QUEUE, ROLLOUT_QUEUE, TRAINER_QUEUE), strict=True
        ):
            await self._answers(service, partial(self._is_polled, queue))
        self._state.phase = "running"
        self._write()
        self._say("the stack is up")

    def _keep(self, service: Service) -> None:
        self._keepers[service.name] = self._guarded(self._keep_up(service))

    async def _keep_up(self, service: Service) -> None:
        delay = FIRST_DELAY
        self._folder.begin_log(service.name)
        while True:
            started = time.monotonic()
            reason = await self._run_once(service)
            if self._state.phase == "starting":
                raise StackFailure(
                    f"{service.name} ended at its start ({reason}): {self._hint(service)}"
                )
            if time.monotonic() - started > STAYED_UP:
                delay = FIRST_DELAY
            self._say(
                f"{service.name} ended ({reason}); it restarts in {delay:g} s: "
                f"{self._hint(service)}"
            )
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def _run_once(self, service: Service) -> str:
        """Run a service once; returns how it ended."""
        try:
            process = await self._start(service)
        except OSError as error:
            return f"not started: {error}"
        return _exit_reason(await process.wait())

    async def _start(self, service: Service) -> asyncio.subprocess.Process:
        self._folder.create()  # a user may have deleted the logs to free space
        with self._folder.log(service.name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *service.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder.root,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | service.environment,
            )
        self._processes[service.name] = process
        self._state.services[service.name] = ProcessRecord.of(process.pid)
        self._write()
        return process

    async def _answers(self, service: Service, asks: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while not await self._asked(asks):
            if time.monotonic() > deadline:
                raise StackFailure(
                    f"{service.name} doesn't answer {START_TIMEOUT:.0f} s after its start: "
                    f"{self._hint(service)}"
                )
            await asyncio.sleep(POLL)

    async def _asked(self, asks: Callable[[], Awaitable[bool]]) -> bool:
        try:
            return await asyncio.wait_for(asks(), ASK_TIMEOUT)
        except TimeoutError:
            return False

    async def _emulator_answers(self) -> bool:
        return self._listens("emulator", self._state.emulator_port)

    async def _temporal_answers(self) -> bool:
        from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
        from temporalio.client import Client
        from temporalio.service import RPCError

        if not self._listens("temporal", self._state.temporal_port):
            return False
        try:
            self._client = await Client.connect(self._state.temporal, namespace=DEFAULT_NAMESPACE)
            await self._client.workflow_service.describe_namespace(
                DescribeNamespaceRequest(namespace=DEFAULT_NAMESPACE)
            )
        except (RPCError, RuntimeError):
            return False
        return True

    def _listens(self, name: str, port: int) -> bool:
        """True if our service has the port; a stack started at the same moment may have it."""
        try:
            connections = psutil.Process(self._processes[name].pid).net_connections("tcp")
        except (KeyError, psutil.Error):
            return False
        listening = {each.laddr[1] for each in connections if each.status == psutil.CONN_LISTEN}
        return port in listening

    async def _is_polled(self, queue: str) -> bool:
        from temporalio.api.enums.v1 import TaskQueueType
        from temporalio.api.taskqueue.v1 import TaskQueue
        from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
        from temporalio.service import RPCError

        request = DescribeTaskQueueRequest(
            namespace=DEFAULT_NAMESPACE,
            task_queue=TaskQueue(name=queue),
            task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
        )
        try:
            found = await self._client.workflow_service.describe_task_queue(request)
        except RPCError:
            return False
        return len(found.pollers) > 0

    # Ending

    async def _watch_users(self) -> None:
        """End when no command is attached."""
        with contextlib.closing(FolderLock(self._folder.attached_lock)) as lock:
            while not self._end.done():
                if lock.try_alone():
                    if not self._state.stays:
                        self._finish()
                        # Held to the end: a command that attaches meanwhile waits, then starts a
                        # new stack.
                        await asyncio.Event().wait()
                    lock.release()
                if self._unwritten:
                    self._write()
                await asyncio.sleep(POLL)

    def _set_stays(self, stays: bool) -> None:
        self._state.stays = stays
        self._write()

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _guarded(self, work: "Awaitable[None]") -> "asyncio.Task[None]":
        """A task whose failure ends the stack."""
        task = asyncio.ensure_future(work)

        def check(task: "asyncio.Task[None]") -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and not self._end.done():
                self._end.set_exception(error)

        task.add_done_callback(check)
        return task

    async def _stop_all(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        services = [*self._servers, *self._workers]
        for rank in sorted({service.stop_rank for service in services}):
            names = [service.name for service in services if service.stop_rank == rank]
            await asyncio.gather(
                *(self._stop(self._processes[name]) for name in names if name in self._processes)
            )
        # Processes that user code started belong to the stack too.
        await asyncio.to_thread(end_processes, _others_of_session())

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()

    # Reporting

    # A full disk ends nothing: the state is written later, and lines are lost.

    def _write(self) -> None:
        try:
            self._folder.write(self._state)
            self._unwritten = False
        except OSError:
            self._unwritten = True

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)

    def _hint(self, service: Service) -> str:
        """The last line of a service's log, and the log's path."""
        path = self._folder.log(service.name)
        text = ""
        with contextlib.suppress(OSError):
            text = path.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        last = f"{lines[-1].strip()}: " if lines else ""
        return f"{last}see {path.relative_to(self._folder.root)}"


def _exit_reason(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _others_of_session() -> list[psutil.Process]:
    ours = os.getsid(0)
    found = []
    for pid in psutil.pids():
        try:
            if pid != os.getpid() and os.getsid(pid) == ours:
                found.append(psutil.Process(pid))
        except (OSError, psutil.NoSuchProcess):
            continue
    return found


def main(order: StackOrder) -> int:
    """Run the supervisor; returns at once if the folder has one already."""
    folder = StackFolder(order.root)
    with contextlib.closing(FolderLock(folder.supervisor_lock)) as lock:
        if not lock.try_alone():
            return 0

        async def supervise() -> int:
            return await Supervisor(order, folder).run()

        return asyncio.run(supervise())


if __name__ == "__main__":
    leave(main(StackOrder.model_validate_json(sys.argv[1])))
