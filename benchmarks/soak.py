"""A long run: whether memory and history stay flat.

    python -m benchmarks.soak [--steps 1000]

Trains small steps of the tiny task with everything real, and looks at every process' memory
(resident set, MiB) as steps are committed. Prints a table as it goes and one JSON line at the end:
per process the mean of the run's second and of its last quarter and their ratio `growth`; the
events and bytes of each execution in the run's chain (most, and how many executions); the size of
the run's folder per step. Exits with 1 where a process of Everburn's has grown by more than a
fifth, or where an execution's history is longer than continue-as-new allows.

The Temporal server's own memory is shown and not judged: its caches fill to their limits.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle

from system import tiny_task
from system.processes import ROLES, Stack, stack, until_of
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

SAMPLES = 40
"""Looks at the processes over a run."""
MOST_GROWTH = 1.2
MOST_EVENTS = 5000
"""Of one execution: beyond, replay takes seconds (docs/ARCHITECTURE.md)."""
JUDGED = (*ROLES, "emulator")


@dataclass(frozen=True)
class Look:
    """MiB by process, once `step` was committed."""

    step: int
    memory: dict[str, float]


async def soak(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="everburn-soak-") as name:
        folder = Path(name)
        executions = folder / "executions"
        config = tiny_task.config(
            folder / "runs",
            2 * steps,
            executions,
            extras={"executions": str(executions)},
            completions_per_prompt=2,
            dcp_save_interval=max(1, steps // 20),
        )
        async with stack(folder) as opened:
            handle = await opened.client.start_workflow(
                TrainRun.run, args=[config], id="soak", task_queue=ORCHESTRATOR_QUEUE
            )
            looks = await _watched(opened, handle, steps)
            await handle.result()
            histories = await _histories(opened.client, handle.id)
            kept = sum(f.stat().st_size for f in (folder / "runs").rglob("*") if f.is_file())
        return {
            "steps": looks[-1].step,
            "memory_mib": {kind: _growth(looks, kind) for kind in looks[-1].memory},
            "executions": len(histories),
            "most_events": max(events for events, _ in histories),
            "most_history_bytes": max(size for _, size in histories),
            "store_kib_per_step": round(kept / 1024 / looks[-1].step, 1),
        }


async def _watched(opened: Stack, handle: "WorkflowHandle[Any, Any]", steps: int) -> list[Look]:
    """A look at the processes whenever another part of the steps is committed.

    Raises:
        WorkflowFailureError: the run failed.
        RuntimeError: it ended earlier than it should.
    """
    looks: list[Look] = []
    print("  step  " + "".join(f"{kind:>14}" for kind in ("temporal", *JUDGED)), file=sys.stderr)

    async def all_looked_at() -> bool:
        status = await handle.query(TrainRun.status)
        if status.step >= (len(looks) + 1) * steps / SAMPLES or status.step == steps:
            look = Look(status.step, opened.processes.memory_mib())
            looks.append(look)
            row = "".join(f"{look.memory[kind]:14.1f}" for kind in ("temporal", *JUDGED))
            print(f"{look.step:6}  {row}", file=sys.stderr, flush=True)
        return bool(looks) and looks[-1].step >= steps

    await until_of(handle, all_looked_at, 0.5)
    return looks


def _growth(looks: list[Look], kind: str) -> dict[str, float]:
    last = looks[-1].step
    second = [look.memory[kind] for look in looks if last / 4 < look.step <= last / 2]
    fourth = [look.memory[kind] for look in looks if look.step > last * 3 / 4]
    before, after = statistics.mean(second), statistics.mean(fourth)
    return {
        "second_quarter": round(before, 1),
        "last_quarter": round(after, 1),
        "growth": round(after / before, 3),
    }


async def _histories(client: Client, workflow_id: str) -> list[tuple[int, int]]:
    """Events and bytes of each execution in the run's chain."""
    found = []
    async for execution in client.list_workflows(f'WorkflowId = "{workflow_id}"'):
        handle = client.get_workflow_handle(workflow_id, run_id=execution.run_id)
        info = (await handle.describe()).raw_description.workflow_execution_info
        found.append((info.history_length, info.history_size_bytes))
    return found


def problems(result: dict[str, Any]) -> list[str]:
    """What isn't flat."""
    grown = [
        f"{kind} grew by a factor of {result['memory_mib'][kind]['growth']}"
        for kind in JUDGED
        if result["memory_mib"][kind]["growth"] > MOST_GROWTH
    ]
    if result["most_events"] > MOST_EVENTS:
        grown.append(f"an execution has {result['most_events']} events")
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    result = asyncio.run(soak(parser.parse_args().steps))
    print(json.dumps(result), flush=True)
    found = problems(result)
    for problem in found:
        print(f"not flat: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
