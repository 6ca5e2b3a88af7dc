"""The commands of docs/temporal-cli.md, executed with the real binary on a real run."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from support.command_line import ROOT, Everburn, environment_of_tests, wait_until
from support.sums import write_sums
from workers.stack.folder import StackFolder
from workers.stack.temporal_server import find_binary


class Shell:
    """A shell in a folder in which a local stack is up."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        binary = find_binary().parent
        self._environment = environment_of_tests() | {
            "TEMPORAL_ADDRESS": address,
            "PATH": f"{binary}{os.pathsep}{os.environ['PATH']}",
        }

    def __call__(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def json(self, command: str) -> object:
        done = self(f"{command} --output json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def status(self) -> dict[str, object]:
        """Of the page's run."""
        answer = self.json("temporal workflow query --workflow-id my-run --type status")
        assert isinstance(answer, dict)
        return answer["queryResult"][0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def shell(shared_stack: Everburn) -> Shell:
    write_sums(shared_stack.folder, 8000)
    state = StackFolder(shared_stack.folder).find()
    assert state is not None
    return Shell(shared_stack.folder, state.temporal)


def commands() -> list[str]:
    """The commands of the page, in its order; the export is the fixture's."""
    page = (ROOT / "docs" / "temporal-cli.md").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("temporal ")]


def test_the_page_drives_a_run_from_start_to_result(shell: Shell) -> None:
    start, *rest = commands()
    *others, stop, result = rest
    assert "--fail-existing" in start and "signal" in stop and "result" in result

    started = shell(start)
    assert started.returncode == 0, started.stderr
    wait_until(lambda: int(str(shell.status()["step"])) >= 1, "the first step")

    for command in others:
        done = shell(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), command

    existing = shell(start)
    assert existing.returncode != 0
    assert "already" in existing.stderr.lower()

    for command in (stop, result):
        done = shell(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert shell.status()["phase"] == "stopped"
    assert int(str(shell.status()["step"])) >= 1


def test_an_update_that_makes_no_sense_is_refused_in_words(shell: Shell) -> None:
    shell(
        "temporal workflow start --type TrainRun --task-queue everburn-orchestrator "
        "--workflow-id other-run --input-file run.json"
    )
    update = "temporal workflow update execute --workflow-id other-run --name"

    resume = shell(f"{update} resume")
    assert resume.returncode != 0
    assert "neither paused nor held" in resume.stderr

    fixed = shell(f'{update} reconfigure --input \'{{"base_model": "x"}}\'')
    assert fixed.returncode != 0
    assert "base_model can't change while a run continues" in fixed.stderr

    ended = shell("temporal workflow cancel --workflow-id other-run")
    assert ended.returncode == 0
    result = shell("temporal workflow result --workflow-id other-run")
    assert "cancel" in (result.stdout + result.stderr).lower()


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("{not json", "not valid JSON"),
        ("[1, 2]", "a run's configuration is a JSON object, not list"),
        ('{"rollout": "sums:make_rollout_fn"}', "dataset: Field required"),
        ({"completions_per_promt": 8}, "did you mean completions_per_prompt"),
        ({"rollout": "nowhere:make"}, "can't import 'nowhere'"),
    ],
)
def test_bad_input_is_answered_at_once(
    shell: Shell, given: str | dict[str, object], complaint: str
) -> None:
    """given: the whole input, or what is changed in a good one."""
    good = json.loads((shell.folder / "run.json").read_text())
    text = given if isinstance(given, str) else json.dumps(good | given)
    name = f"bad-{abs(hash(text))}"
    (shell.folder / "bad.json").write_text(text)
    done = shell(
        "temporal workflow execute --type TrainRun --task-queue everburn-orchestrator "
        f"--workflow-id {name} --input-file bad.json"
    )
    assert done.returncode != 0
    assert complaint.lower() in (done.stdout + done.stderr).lower()
    assert not (shell.folder / "runs" / name / "publications").exists(), "nothing is provisioned"
