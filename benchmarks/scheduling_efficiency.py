"""Scheduling efficiency: the real workflows on a real server, compared with the ideal schedule.

    python -m benchmarks.scheduling_efficiency [--rows 96]

96 rows of 8 completions, 8 rows per step, O=1; rollouts and trainer wait instead of computing
(benchmarks/simulation.py). Prints one JSON line without C and one with C=64: `wall_s`, from the
opening of admission to the last commit; `ideal_s`, from an event simulation of the same schedule
without overhead; `ratio` = ideal_s / wall_s; `cpu_ms_per_rollout` by process.
"""

import argparse
import asyncio
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowHandle

from benchmarks.simulation import Trace, ideal_seconds
from system.processes import (
    Processes,
    simulated_trainer_command,
    temporal,
    until_of,
    worker_command,
)
from workflows.messages import RunResult
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun

TOKENIZER = "accounts/everburn/models/tiny"


async def measure(trace: Trace, concurrency: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="everburn-benchmark-") as folder:
        async with temporal(Path(folder)) as (processes, client, address):
            processes.start("orchestrator", worker_command("orchestrator", address))
            processes.start("rollout", worker_command("rollout", address))
            processes.start("trainer", simulated_trainer_command(address))
            run = await start(client, trace, concurrency, Path(folder))
            await admission_opens(run)
            before = processes.cpu_seconds()
            result = await run.result()
            cpu = _cpu_per_rollout(processes, before, trace.rows * trace.group)
            metrics = _steps(Path(result.folder))
    wall = sum(step["perf/step_time"] for step in metrics)
    ideal = ideal_seconds(trace, concurrency)
    return {
        "concurrency": concurrency,
        "rows": trace.rows,
        "wall_s": round(wall, 2),
        "ideal_s": round(ideal, 2),
        "ratio": round(ideal / wall, 3),
        "cpu_ms_per_rollout": cpu,
    }


async def start(
    client: Client, trace: Trace, concurrency: int | None, folder: Path
) -> WorkflowHandle[TrainRun, RunResult]:
    config = {
        "rollout": "benchmarks.simulation:make_rollout_fn",
        "dataset": {"name": "benchmarks.simulation:rows", "kwargs": {"count": trace.rows}},
        "shuffle": False,
        "base_model": TOKENIZER,
        "backend": "emulator",
        "completions_per_prompt": trace.group,
        "prompt_groups_per_step": trace.per_step,
        "max_head_offpolicy_versions": trace.ahead,
        "max_concurrency_rollout_sample": concurrency,
        "store": str(folder / "runs"),
    }
    return await client.start_workflow(
        TrainRun.run, config, id="benchmark", task_queue=ORCHESTRATOR_QUEUE
    )


async def admission_opens(run: WorkflowHandle[TrainRun, RunResult]) -> None:
    """Wait until admission opens. Raises WorkflowFailureError if the run fails before."""

    async def opened() -> bool:
        return (await run.query(TrainRun.status)).samples_in_flight > 0

    await until_of(run, opened, 0.05)


def _cpu_per_rollout(
    processes: Processes, before: dict[str, float], rollouts: int
) -> dict[str, float]:
    used = processes.cpu_seconds()
    return {name: round(1000 * (used[name] - before[name]) / rollouts, 2) for name in used}


def _steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record for record in records if "train/lr" in record]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=Trace.rows)
    rows = parser.parse_args().rows
    for concurrency in (None, 64):
        result = asyncio.run(measure(replace(Trace(), rows=rows), concurrency))
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
