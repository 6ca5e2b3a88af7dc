import os
import sys
from pathlib import Path

import pytest

from support.command_line import ROOT, Everburn
from workers import doctor
from workers.doctor import check_disk, check_packages, check_python


def test_a_machine_that_has_everything(everburn: Everburn) -> None:
    done = everburn("doctor")
    assert done.returncode == 0, done.stdout
    subjects = [line[8:].split(":")[0] for line in done.stdout.splitlines()]
    for subject in ("Python", "package workflows", "Temporal", "disk", "torch"):
        assert subject in subjects


def test_what_is_missing_makes_it_fail(everburn: Everburn) -> None:
    done = everburn("doctor", "absent.json")
    assert done.returncode == 1
    assert "missing configuration: can't read absent.json" in done.stdout


def test_another_package_of_our_name(everburn: Everburn) -> None:
    """llama-index-workflows installs a top-level `workflows`, as this folder has one."""
    package = everburn.folder / "elsewhere" / "workflows"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    found = f"package workflows: {package} is in the place of "

    done = everburn("doctor", PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert f"missing {found}" in done.stdout

    done = everburn("dev", PYTHONPATH=f"{package.parent}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert f"error: {found}" in done.stderr
    assert "Traceback" not in done.stderr


def test_our_own_packages_are_in_their_place() -> None:
    assert {finding.verdict for finding in check_packages()} == {"ok"}


def test_an_unsupported_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    finding = check_python()
    assert finding.verdict == "missing"
    assert "3.11 or 3.12" in finding.text


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED_DISK", 1e9)
    finding = check_disk(tmp_path)
    assert finding.verdict == "missing"
    assert "make room" in finding.text
