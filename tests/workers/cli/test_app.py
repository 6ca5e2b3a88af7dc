"""Bad input is reported without starting anything."""

import json
import socket
from typing import Any

import pytest

from support.command_line import Everburn

CONFIG = {
    "rollout": "task:make_rollout_fn",
    "dataset": "rows.jsonl",
    "base_model": "tiny",
    "backend": "emulator",
}
SERVERLESS = {"backend": "serverless", "lora_rank": 8, "tokenizer_model": "some/tokenizer"}


def config(everburn: Everburn, **changes: Any) -> str:
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG | changes))
    return "run.json"


def refused(everburn: Everburn, *arguments: str, **environment: str) -> str:
    """A command's error text; it must be bad input, and start nothing."""
    done = everburn(*arguments, **environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (everburn.folder / ".everburn").exists()
    assert not (everburn.folder / "runs").exists()
    assert everburn.processes() == []
    return done.stderr


def test_all_problems_of_a_configuration(everburn: Everburn) -> None:
    text = refused(everburn, "run", config(everburn, epocs=2, completions_per_prompt=1))
    assert text.startswith("error: run.json: 2 problems in the configuration:")
    assert "epocs: no such field; did you mean epochs?" in text
    assert "completions_per_prompt:" in text


def test_a_missing_configuration_file(everburn: Everburn) -> None:
    assert "can't read run.json" in refused(everburn, "run", "run.json")


def test_a_missing_dataset_file(everburn: Everburn) -> None:
    text = refused(everburn, "run", config(everburn))
    assert f"there is no dataset file {everburn.folder / 'rows.jsonl'}" in text


def test_a_missing_key_is_named_and_read_from_a_dotenv_file(everburn: Everburn) -> None:
    (everburn.folder / "rows.jsonl").write_text("{}\n")
    path = config(everburn, **SERVERLESS)
    assert "FIREWORKS_API_KEY is empty" in refused(everburn, "run", path)

    (everburn.folder / ".env").write_text("FIREWORKS_API_KEY=fw_secret\n")
    done = everburn("doctor", path)
    assert "ok      API key: in FIREWORKS_API_KEY" in done.stdout
    assert "fw_secret" not in done.stdout + done.stderr


def test_an_unknown_base_model_of_the_emulator(everburn: Everburn) -> None:
    (everburn.folder / "rows.jsonl").write_text("{}\n")
    text = refused(everburn, "run", config(everburn, base_model="huge"))
    assert "unknown base model 'huge': the emulator has accounts/everburn/models" in text


@pytest.mark.parametrize("command", ["status", "stop", "list"])
def test_no_stack_in_this_folder(everburn: Everburn, command: str) -> None:
    done = everburn(command)
    assert done.returncode == 1
    assert "start one with `everburn dev`" in done.stderr
    assert not (everburn.folder / ".everburn").exists()


@pytest.mark.parametrize("command", [["list"], ["worker", "rollout"]])
def test_nothing_answers_at_an_address(
    everburn: Everburn, dead_url: str, command: list[str]
) -> None:
    address = dead_url.removeprefix("http://")
    done = everburn(*command, "--address", address)
    assert done.returncode == 1
    assert f"error: Temporal doesn't answer at {address}" in done.stderr
    assert "everburn dev" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use(everburn: Everburn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for command in (["dev", "--port", port], ["emulator", "--port", port]):
            done = everburn(*command)
            assert done.returncode == 2
            assert f"port {port} for the" in done.stderr
            assert "in use" in done.stderr
    assert everburn.processes() == []


@pytest.mark.parametrize(
    "command", [["resume", "other"], ["fork", "other", "--at-step", "1"], ["reap", "other"]]
)
def test_a_folder_without_a_run_or_with_a_damaged_one(
    everburn: Everburn, command: list[str]
) -> None:
    """The output folder of `everburn hud train` has another config.json."""
    file = everburn.folder / "runs" / "other" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"backend": "emulator", "steps": 3}')
    done = everburn(*command)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {file} isn't a run's configuration: ")
    assert "steps: no such field" in done.stderr
    assert "Traceback" not in done.stderr

    file.write_text('{"backend": "emul')
    done = everburn(*command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {file} isn't JSON: ")
    assert "Traceback" not in done.stderr
    assert everburn.processes() == []


def test_usage_errors_are_bad_input(everburn: Everburn) -> None:
    assert "Missing argument" in refused(everburn, "run")
    assert "No such option" in refused(everburn, "dev", "--prot", "1")


def test_every_command_has_help(everburn: Everburn) -> None:
    text = everburn("--help").stdout
    for command in ("run", "dev", "status", "stop", "list", "worker", "emulator", "doctor"):
        assert f" {command} " in text
