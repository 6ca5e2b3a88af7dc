"""Soak test: memory and history must stay flat over a long run.

    python -m benchmarks.soak [--steps 1000]

Trains small steps of the tiny task with everything real, and measures every process's memory
(resident set, MiB) as steps are committed. Prints a table as it runs and one JSON line at the end:
per process the mean memory in the run's second and last quarter and their ratio `growth`; the
number of executions in the run's chain, and the most events and bytes of one; the size of the run's
folder per step. Exits with 1 if a process of Everburn has grown by more than a fifth, or if an
execution's history is longer than continue-as-new allows.

The Temporal server's own memory is shown without a limit: its caches fill to their limits.
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
"""Memory samples over a run."""
MOST_GROWTH = 1.2
MOST_EVENTS = 5000
"""Maximum events of one execution: beyond it, replay takes seconds (docs/ARCHITECTURE.md)."""
JUDGED = (*ROLES, "emulator")


@dataclass(frozen=True)
class Sample:
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
            samples = await _watched(opened, handle, steps)
            await handle.result()
            histories = await _histories(opened.client, handle.id)
            kept = sum(f.stat().st_size for f in (folder / "runs").rglob("*") if f.is_file())
        return {
            "steps": samples[-1].step,
            "memory_mib": {kind: _growth(samples, kind) for kind in samples[-1].memory},
            "executions": len(histories),
            "most_events": max(events for events, _ in histories),
            "most_history_bytes": max(size for _, size in histories),
            "store_kib_per_step": round(kept / 1024 / samples[-1].step, 1),
        }


async def _watched(opened: Stack, handle: "WorkflowHandle[Any, Any]", steps: int) -> list[Sample]:
    """Sample the processes' memory at even intervals of committed steps.

    Raises:
        WorkflowFailureError: the run failed.
        RuntimeError: the run ended too early.
    """
    samples: list[Sample] = []
    print("  step  " + "".join(f"{kind:>14}" for kind in ("temporal", *JUDGED)), file=sys.stderr)

    async def all_sampled() -> bool:
        status = await handle.query(TrainRun.status)
        if status.step >= (len(samples) + 1) * steps / SAMPLES or status.step == steps:
            sample = Sample(status.step, opened.processes.memory_mib())
            samples.append(sample)
            row = "".join(f"{sample.memory[kind]:14.1f}" for kind in ("temporal", *JUDGED))
            print(f"{sample.step:6}  {row}", file=sys.stderr, flush=True)
        return bool(samples) and samples[-1].step >= steps

    await until_of(handle, all_sampled, 0.5)
    return samples


def _growth(samples: list[Sample], kind: str) -> dict[str, float]:
    last = samples[-1].step
    second = [sample.memory[kind] for sample in samples if last / 4 < sample.step <= last / 2]
    fourth = [sample.memory[kind] for sample in samples if sample.step > last * 3 / 4]
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
    """Describe everything that isn't flat."""
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
