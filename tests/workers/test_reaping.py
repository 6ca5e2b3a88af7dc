"""What `everburn reap` does with the trainer job and the deployment of a run that is no more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everburn.config import parse_config
from everburn.emulator.base_model import TINY
from everburn.provisioning import find_resources
from everburn.refs import RunRef
from everburn.run_folder import Owner, create_run_folder
from everburn.store import ArtifactStore
from everburn.trainers.jobs import RunResources
from support.command_line import Everburn
from support.emulator import RunningEmulator, running_emulator
from workers.ports import free_port

KEY = "fw_a_key_of_this_test"


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEmulator]:
    with running_emulator(tmp_path_factory.mktemp("reaping")) as running:
        yield running


def a_run(folder: Path, base_url: str, **fields: Any) -> RunRef:
    """The folder of a run; nothing runs."""
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": TINY,
        "tokenizer_model": "not needed",
        "backend": "dedicated",
        "trainer": {"training_shape": "accounts/everburn/trainingShapes/tiny"},
        "base_url": base_url,
    }
    run = RunRef(store=str(folder / "runs"), id="dead")
    create_run_folder(run, parse_config(values | fields), Owner(chain=str(folder)))
    return run


def provision(run: RunRef, emulator: RunningEmulator) -> str:
    """Make its job and deployment, as its workers did; returns their id."""
    from everburn.run_folder import stored_config

    assert RunResources(run, stored_config(run)).advance().stage == "ready"
    record = find_resources(ArtifactStore.of(run))
    assert record is not None and record.job_id == record.deployment_id
    assert emulator.admin("GET", "state")["jobs"][record.job_id] == "JOB_STATE_RUNNING"
    return record.job_id


def test_a_dead_runs_job_and_deployment_are_given_back(
    everburn: Everburn, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    run = a_run(everburn.folder, emulator.url)
    name = provision(run, emulator)

    done = everburn("reap", run.id)  # without the key it can't, and says so
    assert done.returncode == 1
    (left,) = (line for line in done.stdout.splitlines() if line.startswith("left: "))
    assert "the environment variable FIREWORKS_API_KEY is empty" in left

    for _ in range(2):
        done = everburn("reap", run.id, FIREWORKS_API_KEY=KEY)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "run dead: 0 resources reaped, 0 left" in done.stdout
        assert f"deployment {name} is deleted; trainer job {name} is deleted" in done.stdout
        assert KEY not in done.stdout
    state = emulator.admin("GET", "state")
    assert state["jobs"][name] == "JOB_STATE_DELETED"
    assert name not in state["deployments"]


def test_what_its_configuration_keeps_is_kept_and_said(
    everburn: Everburn, emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIREWORKS_API_KEY", KEY)
    run = a_run(everburn.folder, emulator.url, deployment={"cleanup": "keep"})
    name = provision(run, emulator)
    done = everburn("reap", run.id, FIREWORKS_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"deployment {name} is kept, and costs as long as it has replicas" in done.stdout
    assert name in emulator.admin("GET", "state")["deployments"]


def test_what_an_emulator_made_is_gone_with_it(
    everburn: Everburn, emulator: RunningEmulator
) -> None:
    run = a_run(everburn.folder, emulator.url, backend="emulator-dedicated")
    provision(run, emulator)
    path = ArtifactStore.of(run).folder
    config = Path(path) / "config.json"
    config.write_text(config.read_text().replace(emulator.url, f"http://127.0.0.1:{free_port()}"))
    done = everburn("reap", run.id)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run dead: 0 resources reaped, 0 left" in done.stdout
