"""A stack of real processes, with runs on it and planned troubles.

Owns how tests plan what happens at a named point (kill_points.py), start runs of the tiny task and
audit them at the end (tests/system/audit.py).
"""

import itertools
import os
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
from temporalio.client import WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode

from chaos.kill_points import FOLDER, Plan, sessions_of_the_dead, write_plan
from everburn.emulator.unknowns import WORST_CASE
from everburn.records.ids import RunRef
from everburn.records.keys import ROWS_KEY
from everburn.records.verification import Verified
from support.runs import StartedRun
from support.waiting import until
from system import tiny_task
from system.audit import audit, check_no_session_lives
from system.processes import ROOT, Death, Stack, stack
from system.tiny_task import Execution, read_executions
from workflows.messages import RunResult
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

PATIENCE = 180.0
"""Seconds for a run of a few steps, deaths included, on a busy machine."""
OFTEN = "limit.historyCount.suggestContinueAsNew=150"
"""Runs of these tests continue as new after every step or two, so that troubles hit that too."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Trouble:
    """An event that is planned for a named point."""

    file: Path
    plan: Plan

    @property
    def met(self) -> bool:
        return self.file.with_suffix(".hit").exists() and not self.file.exists()


@dataclass
class Run(StartedRun):
    """A run of the tiny task and what its test reads of it."""

    executed: Path

    patience = PATIENCE

    @property
    def executions(self) -> list[Execution]:
        return list(read_executions(self.executed))

    async def until_rows(self) -> None:
        """Return once the task has been prepared."""
        await until(lambda: self.store.exists(ROWS_KEY), lambda: "for the task", PATIENCE)


@dataclass
class Chaos:
    """The stack, the troubles and the runs of one test."""

    stack: Stack
    folder: Path
    """The test session's folder of runs, logs and plans."""
    backend: str = "serverless"
    """Where runs train (tests/system/tiny_task.py), unless their fields say otherwise."""
    troubles: list[Trouble] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    known_sessions: set[str] = field(default_factory=set)
    """The emulator's sessions when the test began: those of earlier tests, until they expire."""
    known_deaths: int = 0

    async def begin(self) -> None:
        """Record the existing sessions and deaths. Raises if a process can't be restarted."""
        self.stack.processes.check()
        self.known_sessions = set(await self.sessions())
        self.known_deaths = len(self.stack.processes.deaths)

    def plan(
        self,
        point: str,
        action: Literal["kill", "freeze", "full"] = "kill",
        *,
        skip: int = 0,
        times: int = 1,
    ) -> Trouble:
        """Plan an event at a named point, from now on."""
        trouble = Trouble(
            self.folder / "plans" / f"{next(_numbers)}.plan", Plan(point, action, skip, times)
        )
        write_plan(trouble.file, trouble.plan)
        self.troubles.append(trouble)
        return trouble

    async def frozen(self, trouble: Trouble) -> str:
        """The name of the process that has reached the point, once it is frozen there."""
        names = self.stack.processes.frozen
        await until(
            lambda: trouble.met and bool(names()),
            lambda: f"no process reached {trouble.plan}",
            PATIENCE,
        )
        (name,) = names()
        return name

    async def fault(self, operation: str, kind: str, **details: Any) -> None:
        """Plan a fault of the emulator (everburn/emulator/faults.py)."""
        await self._emulator("POST", "faults", {"operation": operation, "kind": kind, **details})

    async def faults(self) -> list[dict[str, Any]]:
        """The emulator's faults that haven't happened yet."""
        found = (await self._emulator("GET", "faults"))["faults"]
        assert isinstance(found, list)
        return found

    async def admin(self, path: str, **body: Any) -> None:
        """Change how the emulator behaves (everburn/emulator/http/admin.py)."""
        await self._emulator("POST", path, body)

    async def sessions(self) -> dict[str, Any]:
        """The open trainer sessions of the emulator."""
        found = (await self._emulator("GET", "state"))["sessions"]
        assert isinstance(found, dict)
        return found

    async def start(self, rows: int = 8, task: str = "system.tiny_task", **fields: Any) -> Run:
        """Start a run with these fields of its configuration."""
        name = f"run-{next(_numbers)}"
        executed = self.folder / f"{name}.executions"
        executed.touch()
        extras = fields.pop("extras", {})
        rollout = fields.pop("rollout", f"{task}:make_rollout_fn")
        fields = tiny_task.BACKENDS[self.backend] | fields
        config = tiny_task.config(self.folder / "runs", rows, executed, **fields)
        config["rollout"] = rollout
        config["extras"] |= extras
        handle: WorkflowHandle[Any, RunResult] = await self.stack.client.start_workflow(
            TrainRun.run, args=[config], id=name, task_queue=ORCHESTRATOR_QUEUE
        )
        run = Run(RunRef(store=str(self.folder / "runs"), id=name), handle, executed)
        self.runs.append(run)
        return run

    async def survived(
        self,
        run: Run,
        steps: int = 4,
        patience: float = PATIENCE,
        again: Collection[int] = (),
    ) -> Verified:
        """The run completes, all its troubles happened, its audit passes, and the service keeps
        nothing of it. again: rows that were started again on purpose."""
        result = await run.result(patience)
        assert result.steps == steps
        for trouble in self.troubles:
            assert trouble.met, f"no process reached {trouble.plan}"
        await self.emulator_answers()
        unknowns = (await self._emulator("GET", "state"))["unknowns"]
        assert all(unknowns.values()), f"the emulator wasn't at its worst: {unknowns}"
        known = self.known_sessions | self.sessions_of_the_dead
        return await audit(run.ref, self.stack, run.executed, again, known)

    @property
    def deaths(self) -> list[Death]:
        """The deaths of processes during this test."""
        return self.stack.processes.deaths[self.known_deaths :]

    @property
    def sessions_of_the_dead(self) -> set[str]:
        """Sessions of processes that are known to be dead: an audit doesn't wait until the service
        misses their heartbeats."""
        return sessions_of_the_dead(self.folder / "plans")

    async def no_session_left(self) -> None:
        """All sessions of this test's runs were closed, or have expired at the service."""
        await check_no_session_lives(self.stack, self.known_sessions)

    async def emulator_answers(self) -> None:
        async def answers() -> bool:
            try:
                await self.sessions()
            except httpx.TransportError:
                return False
            return True

        await until(answers, lambda: "the emulator doesn't come back", PATIENCE)

    async def close(self) -> None:
        """End the runs of a failed test and delete all plans."""
        await self.stack.answers()
        for trouble in self.troubles:
            trouble.file.unlink(missing_ok=True)
        for name in self.stack.processes.frozen():
            self.stack.processes.thaw(name)
        for run in self.runs:
            try:
                await run.handle.terminate("its test is over")
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:  # the run has ended
                    raise
        await self.emulator_answers()
        await self._emulator("DELETE", "faults")
        await self._emulator("POST", "capacity", {})
        await self._emulator("POST", "unknowns", asdict(WORST_CASE))

    async def _emulator(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        async with httpx.AsyncClient(timeout=30) as http:
            url = f"{self.stack.emulator_url}/emulator/{path}"
            reply = await http.request(method, url, json=body)
        reply.raise_for_status()
        answer: dict[str, Any] = reply.json()
        return answer


@asynccontextmanager
async def open_stack(folder: Path) -> AsyncIterator[Stack]:
    """A stack of processes with named points, and an emulator at its worst. A process that dies
    starts again after a second."""
    plans = folder / "plans"
    plans.mkdir()
    paths = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {
        FOLDER: str(plans),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, paths)]),
    }
    async with stack(folder, process_command, environment, [OFTEN], worst=True) as opened:
        with opened.processes.kept_up():
            yield opened
    left = leftover_processes(plans)
    assert not left, f"processes outlive the stack: {left}"


def process_command(*arguments: str) -> list[str]:
    """`everburn ARGUMENTS`, with named points."""
    return [sys.executable, "-P", "-m", "chaos.process", *arguments]


def leftover_processes(plans: Path) -> list[psutil.Process]:
    """Processes that were started for a stack, by the test or by each other."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(FOLDER) == str(plans):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found
