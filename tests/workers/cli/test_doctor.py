import json
import os
import sys
from pathlib import Path

import pytest

from everburn.emulator.models import base_model
from support.command_line import ROOT, Everburn
from support.emulator import RunningEmulator
from support.sums import write_sums
from workers.cli import doctor
from workers.cli.doctor import check_disk, check_packages, check_python, check_store
from workers.cli.run_file import load_run_file


def test_a_complete_machine(everburn: Everburn) -> None:
    done = everburn("doctor")
    assert done.returncode == 0, done.stdout
    subjects = [line[8:].split(":")[0] for line in done.stdout.splitlines()]
    for subject in ("Python", "package workflows", "Temporal", "disk", "torch"):
        assert subject in subjects


def test_the_service_is_asked_about_a_run(everburn: Everburn, emulator: RunningEmulator) -> None:
    """`--live` against the emulator: opens no session, and prints no key."""
    key = "fw_a_key_of_this_test"
    config = {
        "rollout": "task:make",
        "dataset": {"name": "task:rows"},
        "backend": "dedicated",
        "base_url": emulator.url,
        "base_model": base_model.TINY,
        "tokenizer_model": str(base_model.ensure(base_model.TINY)),
        "trainer": {"training_shape": "accounts/everburn/trainingShapes/tiny"},
        "output_model_id": "not-yet-there",
    }
    (everburn.folder / "run.json").write_text(json.dumps(config))
    before = held(emulator)
    done = everburn("doctor", "run.json", "--live", FIREWORKS_API_KEY=key)
    assert done.returncode == 0, done.stdout
    shown = dict(line[8:].split(": ", 1) for line in done.stdout.splitlines())
    assert shown["account"] == "everburn"
    assert shown["base model"] == base_model.TINY
    assert shown["training shape"].startswith("accounts/everburn/trainingShapes/tiny/versions/")
    assert shown["output_model_id"].endswith("/models/not-yet-there is free")
    assert "tokens" in shown["tokenizer"]
    assert held(emulator) <= before, "sessions of other tests may have ended"

    config["base_model"] = "accounts/everburn/models/none"
    (everburn.folder / "run.json").write_text(json.dumps(config))
    emulator.plan_fault("versions", "status", status=403, message=f"{key} may not")
    done = everburn("doctor", "run.json", "--live", FIREWORKS_API_KEY=key)
    assert done.returncode == 1
    missing = [line for line in done.stdout.splitlines() if line.startswith("missing")]
    assert len(missing) == 2
    assert "there is no model accounts/everburn/models/none" in missing[0]
    assert "FIREWORKS_API_KEY lacks the permission" in missing[1]
    assert key not in done.stdout + done.stderr


def held(emulator: RunningEmulator) -> set[tuple[str, str]]:
    """Jobs, deployments and sessions at the emulator."""
    state = emulator.admin("GET", "state")
    kinds = ("sessions", "jobs", "deployments")
    return {(kind, name) for kind in kinds for name in state[kind]}


def test_live_checks_need_a_configuration(everburn: Everburn) -> None:
    done = everburn("doctor", "--live")
    assert done.returncode == 2
    assert "give its CONFIG" in done.stderr


def test_a_missing_requirement_makes_doctor_fail(everburn: Everburn) -> None:
    done = everburn("doctor", "absent.json")
    assert done.returncode == 1
    assert "missing configuration: can't read absent.json" in done.stdout


def test_a_shadowed_package_is_reported(everburn: Everburn) -> None:
    """llama-index-workflows installs a top-level `workflows`, like this folder."""
    package = everburn.folder / "elsewhere" / "workflows"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    found = f"package workflows: {package} is imported instead of "

    done = everburn("doctor", PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert f"missing {found}" in done.stdout

    done = everburn("dev", PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert f"error: {found}" in done.stderr
    assert "Traceback" not in done.stderr


def test_our_own_packages_are_not_shadowed() -> None:
    assert {finding.verdict for finding in check_packages()} == {"ok"}


def test_a_store_without_its_library(
    everburn: Everburn, tmp_path: Path, uninstalled_store: str
) -> None:
    write_sums(everburn.folder, 4)
    verdicts = {}
    for store in (uninstalled_store, "nowhere://bucket", "memory://bucket/runs", "runs"):
        file = load_run_file(everburn.folder / "run.json", [f"store={store}"], tmp_path)
        verdicts[store] = check_store(file.config)
    assert [each.verdict for each in verdicts.values()] == ["missing", "missing", "ok", "ok"]
    assert verdicts[uninstalled_store].text == f"{uninstalled_store}: Install absentfs"
    assert f"ok      store: {everburn.folder}/runs" in everburn("doctor", "run.json").stdout


def test_an_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    finding = check_python()
    assert finding.verdict == "missing"
    assert "3.11 or 3.12" in finding.text


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_DISK", 1e9)
    finding = check_disk(tmp_path)
    assert finding.verdict == "missing"
    assert "free some space" in finding.text
