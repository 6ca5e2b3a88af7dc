"""Assertions that hold for a completed run of tiny_task, whatever happened to its processes.

The run is verified against its ledger, each row has one outcome, no finished completion was
executed again, nothing is left at the services, and histories replay. Doesn't own the verification
against the ledger (everburn/records/verification.py).
"""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from temporalio.client import Client

from everburn.learning.group import all_groups
from everburn.records.ids import RunRef
from everburn.records.ledger import read_ledger
from everburn.records.provisioning import find_provisioning
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from everburn.records.verification import Verified, row_count, verify
from everburn.trainers.backends import EMULATOR_URL_ENV
from system.histories import first_execution, replay, run_histories
from system.processes import PATIENCE, Stack
from system.tiny_task import Execution, read_executions
from workers.plugin import everburn_plugin


class AuditError(AssertionError):
    """A run violates an assertion."""


SILENCE = 25.0
"""Seconds without a heartbeat after which a session's holder is dead: it sends one every 10."""


async def audit(
    run: RunRef,
    stack: Stack,
    executions: Path,
    again: Collection[int] = (),
    known: Collection[str] = (),
) -> Verified:
    """Check a completed run. again: rows that were deliberately retried after an error. known:
    sessions open at the service before the run.

    Raises:
        AuditError, VerificationError: the first violation.
    """
    verified = await verified_weights(run, stack)
    check_outcomes(run, verified)
    check_executions(run, list(read_executions(executions)), again)
    await check_nothing_runs(stack.client, run)
    await check_nothing_is_kept(stack, run)
    await check_no_session_lives(stack, known)
    await check_replay(stack.client, run)
    return verified


async def verified_weights(run: RunRef, stack: Stack) -> Verified:
    """`everburn verify`, on the stack's emulator. Raises VerificationError."""
    from everburn.emulator.training.checkpoints import weights_digest
    from everburn.trainers.serverless import ServerlessTrainer

    with _emulator_of(stack):
        return await verify(
            run,
            lambda: ServerlessTrainer.open(stored_config(run)),
            lambda path: weights_digest(stack.emulator_home, path),
            name=f"verify-{time.time_ns()}",
        )


def check_outcomes(run: RunRef, verified: Verified) -> None:
    """Each row has an outcome, and weights have changed."""
    rows = row_count(run)
    if verified.rows_trained + verified.rows_rejected != rows:
        raise AuditError(f"{verified} doesn't account for the run's {rows} rows")
    ledger = read_ledger(ArtifactStore.of(run))
    if verified.uncompared:
        raise AuditError(f"{verified.steps} of {len(ledger)} steps are covered by a checkpoint")
    if not any(entry.updated for entry in ledger):
        raise AuditError("no step has changed weights: there was nothing to verify")
    if [entry.version for entry in ledger] != list(range(1, len(ledger) + 1)):
        raise AuditError("versions don't follow each other")


def check_executions(run: RunRef, executions: list[Execution], again: Collection[int] = ()) -> None:
    """No completion was executed again after it was recorded, or after it returned in a process
    that survived."""
    executions = [execution for execution in executions if execution.row not in again]
    written = {place: at for place, at in _written(run).items() if place[0] not in again}
    returned: dict[tuple[int, int], list[Execution]] = defaultdict(list)
    for execution in executions:
        at = written.get(execution.place)
        if execution.event == "begun" and at is not None and execution.at > at:
            raise AuditError(f"{execution} began {execution.at - at:.3f} s after it was recorded")
        if execution.event == "returned":
            returned[execution.place].append(execution)
    for place, times in returned.items():
        if len({execution.pid for execution in times}) != len(times):
            raise AuditError(f"{place} returned more than once in one process: {times}")
    missing = written.keys() - returned.keys()
    if missing:
        raise AuditError(f"rollouts without an execution: {sorted(missing)}")


async def check_nothing_runs(client: Client, run: RunRef) -> None:
    """Neither the run nor a child of it is open."""
    deadline = time.monotonic() + PATIENCE
    while True:
        # The list is eventually consistent.
        query = "ExecutionStatus = 'Running'"
        mine = [
            workflow.id
            async for workflow in client.list_workflows(query)
            if workflow.id == run.id or workflow.id.startswith(f"{run.id}/")
        ]
        if not mine:
            return
        if time.monotonic() > deadline:
            raise AuditError(f"still running after the run's end: {mine}")
        await asyncio.sleep(0.1)


async def check_nothing_is_kept(stack: Stack, run: RunRef) -> None:
    """No trainer job, deployment or session of a dedicated run is left at the emulator."""
    record = find_provisioning(ArtifactStore.of(run))
    if record is None:
        if stored_config(run).dedicated:
            raise AuditError("a dedicated run without a provisioning record")
        return
    state = await emulator_state(stack)
    # Replaced jobs have the same name with a number.
    jobs = [job for job, at in state["jobs"].items() if job.startswith(record.name)]
    kept = [job for job in jobs if state["jobs"][job] != "JOB_STATE_DELETED"]
    kept += [each for each in state["deployments"] if each.startswith(record.name)]
    kept += [id for id, session in state["sessions"].items() if session["job"] in jobs]
    if kept or record.job_id not in jobs:
        raise AuditError(f"left at the emulator: {kept}; of the run's jobs it knows {jobs}")


async def check_no_session_lives(stack: Stack, known: Collection[str] = ()) -> None:
    """Every session is closed by the process that opened it, also after its lease was given up. The
    service ends those of dead holders; a shorter expiry is set for that."""
    deadline = time.monotonic() + PATIENCE
    while left := set(await live_sessions(stack)) - set(known):
        if time.monotonic() > deadline:
            raise AuditError(f"sessions without a holder are still open: {sorted(left)}")
        await _emulator(stack, "POST", "expire_silent", {"seconds": SILENCE})
        await asyncio.sleep(0.5)


async def check_replay(client: Client, run: RunRef) -> None:
    """The histories of the run's workflows replay with the current code."""
    histories = await run_histories(client, run.id, await first_execution(client, run.id))
    try:
        await replay(histories, [everburn_plugin()])
    except Exception as error:
        raise AuditError(f"a history doesn't replay: {error}") from error


async def live_sessions(stack: Stack) -> list[str]:
    """The open trainer sessions of the emulator."""
    return list((await emulator_state(stack))["sessions"])


async def emulator_state(stack: Stack) -> dict[str, Any]:
    """The emulator's sessions, jobs and deployments."""
    return await _emulator(stack, "GET", "state")


async def _emulator(
    stack: Stack, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    async with httpx.AsyncClient(timeout=30) as http:
        reply = await http.request(method, f"{stack.emulator_url}/emulator/{path}", json=body)
    reply.raise_for_status()
    answer: dict[str, Any] = reply.json()
    return answer


def _written(run: RunRef) -> dict[tuple[int, int], float]:
    """When the first rollout of each completion was written, over all attempts at its row."""
    store = ArtifactStore.of(run)
    found: dict[tuple[int, int], float] = {}
    for group in all_groups(store):
        for member in group.members:
            place = group.key.cursor, member.completion
            at = Path(store.path(member.stored.key)).stat().st_mtime
            found[place] = min(at, found.get(place, at))
    return found


@contextmanager
def _emulator_of(stack: Stack) -> Iterator[None]:
    outer = os.environ.get(EMULATOR_URL_ENV)
    os.environ[EMULATOR_URL_ENV] = stack.emulator_url
    try:
        yield
    finally:
        if outer is None:
            del os.environ[EMULATOR_URL_ENV]
        else:
            os.environ[EMULATOR_URL_ENV] = outer
