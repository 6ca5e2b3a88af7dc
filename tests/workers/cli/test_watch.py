"""The lines that `everburn run` prints while it follows a run."""

import asyncio
import io
import json
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console
from temporalio.client import Client

from support.waiting import until
from workers.cli import run
from workers.cli.run_file import load_run_file
from workers.connection import Server
from workflows.run.train_run import TrainRun

VALUES = {
    "rollout": "task:make",
    "dataset": {"name": "task:rows"},
    "base_model": "some-model",
    "backend": "emulator",
    "lora_rank": 4,
}


async def test_a_run_without_an_orchestrator_worker_is_reported(
    tmp_path: Path, temporal_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SILENCE_LIMIT", 0.1)
    monkeypatch.setattr(run, "REFRESH", 0.1)
    monkeypatch.setattr(run, "QUERY_TIMEOUT", timedelta(seconds=0.2))
    (tmp_path / "run.json").write_text(json.dumps(VALUES))
    file = load_run_file(tmp_path / "run.json", [], tmp_path)
    client = await Client.connect(temporal_server)
    run_id = f"unserved-{uuid.uuid4().hex[:8]}"
    handle = await client.start_workflow(TrainRun.run, {}, id=run_id, task_queue="of-nobody")
    output = io.StringIO()
    order = run.Launch(file, run_id, Server(temporal_server), follows=True)
    following = asyncio.create_task(run.start_and_follow(order, Console(file=output)))
    missing = f"`everburn worker orchestrator --address {temporal_server}`"

    await until(lambda: missing in output.getvalue(), output.getvalue)
    await handle.terminate()
    assert await following == 1
    assert output.getvalue().count(missing) == 1
