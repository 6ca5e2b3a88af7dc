"""Many short runs whose processes are killed at random, each verified against its ledger.

    python -m benchmarks.random_kills [--runs 50] [--seed 0] [--backend serverless|dedicated]

One stack, one run after the other. In each, kill -9 hits processes of every kind, the Temporal
server too, at moments and in an order that the run's seed decides; sometimes two at once. What is
killed starts again after a second. Runs have the default configuration, and nobody helps them: one
that fails or holds has failed. Afterwards each run is audited (tests/system/audit.py). Says how
each run went, prints a summary as one JSON line, and exits with 1 unless all have passed.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from httpx import HTTPError
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from everburn.records.ids import RunRef
from everburn.records.verification import VerificationError
from system import tiny_task
from system.audit import AuditError, audit, live_sessions
from system.processes import ROLES, Stack, result_of, stack
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

KINDS = (*ROLES, "emulator", "temporal")
ROWS = 24
KILLS = 4
"""Moments at which something dies, per run, as long as it lasts."""
FIRST = 6.0
"""Seconds within which the first comes: less than an undisturbed run takes."""
MEAN_GAP = 4.0
"""Seconds between those moments."""
TWO_AT_ONCE = 0.25
"""How often two die together."""
PATIENCE = 300.0
"""Seconds after which a run is given up: many times what it needs."""
OFTEN = "limit.historyCount.suggestContinueAsNew=300"
"""Runs continue as new every few steps, so that kills meet that too."""


@dataclass
class Outcome:
    """How a run went. problem: what is wrong with it, if anything."""

    seed: int
    kills: list[str] = field(default_factory=list)
    seconds: float = 0.0
    problem: str | None = None

    @property
    def line(self) -> str:
        verdict = "passed" if self.problem is None else f"FAILED: {self.problem}"
        return f"seed {self.seed}: {verdict}; {self.seconds:.0f} s, killed {self.kills}"

    @property
    def victims(self) -> Counter[str]:
        return Counter(victim for moment in self.kills for victim in moment.split("+"))


async def disturbed_run(opened: Stack, folder: Path, seed: int, backend: str) -> Outcome:
    """One run, and what its seed says happens to it."""
    started = time.monotonic()
    outcome = Outcome(seed)
    try:
        await _survive(opened, folder, backend, outcome)
    except (AuditError, VerificationError, WorkflowFailureError, RPCError, HTTPError) as error:
        outcome.problem = f"{type(error).__name__}: {error.__cause__ or error}"
    outcome.seconds = time.monotonic() - started
    return outcome


async def _survive(opened: Stack, folder: Path, backend: str, outcome: Outcome) -> None:
    """Run, be killed, and be what a run should be. outcome: is told what happens.

    Raises:
        AuditError, VerificationError, WorkflowFailureError: it isn't.
        RPCError, HTTPError: a server can't be asked.
    """
    await opened.answers()
    known = await live_sessions(opened)
    run = RunRef(store=str(folder / "runs"), id=f"{backend}-{outcome.seed}")
    executions = folder / f"{run.id}.executions"
    executions.touch()
    fields = tiny_task.BACKENDS[backend]
    config = tiny_task.config(Path(run.store), ROWS, executions, **fields)
    handle = await opened.client.start_workflow(
        TrainRun.run, args=[config], id=run.id, task_queue=ORCHESTRATOR_QUEUE
    )
    killing = asyncio.create_task(_kill(opened, outcome))
    try:
        await result_of(handle, PATIENCE)
        if killing.done():
            killing.result()
    except TimeoutError:
        with contextlib.suppress(RPCError):
            await handle.terminate("given up")
        raise AuditError(f"not finished after {PATIENCE:.0f} s") from None
    finally:
        killing.cancel()
    await opened.answers()
    await audit(run, opened, executions, known=known)


async def _kill(opened: Stack, outcome: Outcome) -> None:
    draw = random.Random(outcome.seed)
    gaps = [draw.uniform(0, FIRST), *(draw.expovariate(1 / MEAN_GAP) for _ in range(KILLS - 1))]
    for gap in gaps:
        await asyncio.sleep(gap)
        drawn = draw.sample(KINDS, 2 if draw.random() < TWO_AT_ONCE else 1)
        victims = [victim for victim in drawn if opened.processes.is_up(victim)]
        for victim in victims:
            opened.processes.kill(victim)
        if victims:
            outcome.kills.append("+".join(victims))


async def measure(runs: int, seed: int, backend: str) -> tuple[dict[str, object], bool]:
    """All runs; the summary, and whether all have passed."""
    started = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="everburn-random-kills-") as name:
        async with stack(Path(name), dynamic_config=[OFTEN], worst=True) as opened:
            with opened.processes.kept_up():
                for number in range(seed, seed + runs):
                    outcomes.append(await disturbed_run(opened, Path(name), number, backend))
                    print(outcomes[-1].line, file=sys.stderr, flush=True)
    failed = [outcome.seed for outcome in outcomes if outcome.problem is not None]
    kills = sum((outcome.victims for outcome in outcomes), Counter[str]())
    summary: dict[str, object] = {
        "backend": backend,
        "runs": runs,
        "passed": runs - len(failed),
        "failed_seeds": failed,
        "kills": dict(kills),
        "seconds": round(time.monotonic() - started),
    }
    return summary, not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has +1")
    parser.add_argument("--backend", choices=tiny_task.BACKENDS, default="serverless")
    arguments = parser.parse_args()
    summary, passed = asyncio.run(measure(arguments.runs, arguments.seed, arguments.backend))
    print(json.dumps(summary), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
