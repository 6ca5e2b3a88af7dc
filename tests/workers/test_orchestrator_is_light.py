"""The process of `everburn worker orchestrator` imports nothing heavy."""

import asyncio
import json
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from support.command_line import environment_of_tests
from support.imports import HEAVY
from support.waiting import until
from workers.connection import connect
from workflows.queues import ORCHESTRATOR_QUEUE
from workflows.run.train_run import TrainRun


def test_serving_a_run_imports_nothing_heavy(temporal_server: str, tmp_path: Path) -> None:
    # -X importtime makes Python itself write down each import of the process.
    python = [sys.executable, "-P", "-X", "importtime"]
    command = [
        *python,
        "-m",
        "workers.cli.app",
        "worker",
        "orchestrator",
        "--address",
        temporal_server,
    ]
    imports = tmp_path / "imports.txt"
    with imports.open("w") as stderr:
        worker = subprocess.Popen(command, cwd=tmp_path, env=environment_of_tests(), stderr=stderr)
    try:
        asyncio.run(serve_a_run(temporal_server, tmp_path))
    finally:
        worker.terminate()
        worker.wait(timeout=60)

    imported = set(re.findall(r"^import time:.*\| +(\w+)", imports.read_text(), re.MULTILINE))
    assert {"temporalio", "everburn", "workflows"} <= imported
    assert imported & HEAVY == set()


async def serve_a_run(address: str, folder: Path) -> None:
    """Workflow and activities of the orchestrator, up to where a rollout worker is needed."""
    client = await connect(address, "default")
    run_id = f"light-{uuid.uuid4().hex[:8]}"
    config: dict[str, Any] = {
        "rollout": "task:make_rollout_fn",
        "dataset": "rows.jsonl",
        "base_model": "tiny",
        "backend": "emulator",
        "store": str(folder / "runs"),
    }
    handle = await client.start_workflow(
        TrainRun.run, args=[config], id=run_id, task_queue=ORCHESTRATOR_QUEUE
    )

    async def waits_for_rollout_worker() -> bool:
        return (await handle.query(TrainRun.status)).phase == "preparing"

    try:
        await until(waits_for_rollout_worker)
    finally:
        await handle.terminate()
    written = json.loads((folder / "runs" / run_id / "config.json").read_text())
    assert written["base_model"] == "tiny"
