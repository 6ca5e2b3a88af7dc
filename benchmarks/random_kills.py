"""Many short runs whose processes are killed at random, each verified against its ledger.

    python -m benchmarks.random_kills [--runs 50] [--seed 0] [--backend serverless|dedicated]

One stack, one run after the other. In each, kill -9 hits processes of every kind, including the
Temporal server, at moments and in an order that the run's seed determines; sometimes two at once. A
killed process restarts after a second. Runs have the default configuration, and get no commands: a
run that fails or holds counts as failed. Each run is then audited (tests/system/audit.py). Prints a
line per run and a summary as one JSON line, and exits with 1 unless all runs passed.
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
"""Moments with a kill per run, unless it ends before."""
FIRST = 6.0
"""Maximum seconds before the first kill: less than an undisturbed run takes."""
MEAN_GAP = 4.0
"""Mean seconds between kills."""
TWO_AT_ONCE = 0.25
"""Probability of killing two processes together."""
PATIENCE = 300.0
"""Maximum seconds of a run: many times what it needs."""
OFTEN = "limit.historyCount.suggestContinueAsNew=300"
"""Runs continue as new every few steps, so that kills hit that too."""


@dataclass
class Outcome:
    """The outcome of a run. problem: why it failed, if it did."""

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
    """Execute one run with the kills of its seed."""
    started = time.monotonic()
    outcome = Outcome(seed)
    try:
        await _survive(opened, folder, backend, outcome)
    except (AuditError, VerificationError, WorkflowFailureError, RPCError, HTTPError) as error:
        outcome.problem = f"{type(error).__name__}: {error.__cause__ or error}"
    outcome.seconds = time.monotonic() - started
    return outcome


async def _survive(opened: Stack, folder: Path, backend: str, outcome: Outcome) -> None:
    """Execute a run with kills, and audit it. outcome: records the kills.

    Raises:
        AuditError, VerificationError, WorkflowFailureError: the run failed or isn't correct.
        RPCError, HTTPError: a server doesn't answer.
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
    """Execute all runs; returns the summary, and whether all passed."""
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
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run; each next run adds 1"
    )
    parser.add_argument("--backend", choices=tiny_task.BACKENDS, default="serverless")
    arguments = parser.parse_args()
    summary, passed = asyncio.run(measure(arguments.runs, arguments.seed, arguments.backend))
    print(json.dumps(summary), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
