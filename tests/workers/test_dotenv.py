import os
from pathlib import Path

import pytest

from workers import dotenv
from workers.errors import BadInputError


def test_assignments_are_parsed_as_in_shells() -> None:
    text = """
    # keys of the lab
    FIREWORKS_API_KEY=fw_123
    export REGION = eu-west   # where the data is
    GREETING="one \\"two\\"\\nthree"
    PATTERN='$HOME #1'
    URL=https://example.org/#top
    EMPTY=
    """
    assert dotenv.parse(text) == {
        "FIREWORKS_API_KEY": "fw_123",
        "REGION": "eu-west",
        "GREETING": 'one "two"\nthree',
        "PATTERN": "$HOME #1",
        "URL": "https://example.org/#top",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    "line", ["fw_secret", "KEY='fw_secret", "1KEY=fw_secret", 'K="fw_secret" x']
)
def test_a_bad_line_is_reported_by_number_without_its_text(line: str) -> None:
    with pytest.raises(BadInputError) as caught:
        dotenv.parse(f"A=1\n{line}\n", "/somewhere/.env")
    assert "/somewhere/.env:2:" in str(caught.value)
    assert "fw_secret" not in str(caught.value)


def test_it_never_overrides_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("EVERBURN_TEST_OLD=file\nEVERBURN_TEST_NEW=file\n")
    monkeypatch.setenv("EVERBURN_TEST_OLD", "environment")
    # Restores the environment.
    monkeypatch.setenv("EVERBURN_TEST_NEW", "")
    monkeypatch.delenv("EVERBURN_TEST_NEW")

    assert dotenv.load(tmp_path) == ["EVERBURN_TEST_NEW"]
    assert os.environ["EVERBURN_TEST_OLD"] == "environment"
    assert os.environ["EVERBURN_TEST_NEW"] == "file"


def test_a_later_process_reads_the_current_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERBURN_TEST_KEY", "")
    monkeypatch.delenv("EVERBURN_TEST_KEY")
    monkeypatch.setenv("EVERBURN_TEST_OLD", "environment")
    file = tmp_path / ".env"
    file.write_text("EVERBURN_TEST_KEY=refused\nEVERBURN_TEST_OLD=file\n")
    assert dotenv.load(tmp_path) == ["EVERBURN_TEST_KEY"]

    file.write_text("EVERBURN_TEST_KEY=fixed\nEVERBURN_TEST_OLD=file\n")
    environment = dotenv.outer_environment()
    assert environment["EVERBURN_TEST_OLD"] == "environment"
    monkeypatch.setattr(os, "environ", environment)
    assert dotenv.load(tmp_path) == ["EVERBURN_TEST_KEY"]
    assert os.environ["EVERBURN_TEST_KEY"] == "fixed"


def test_a_folder_without_the_file_is_fine(tmp_path: Path) -> None:
    assert dotenv.load(tmp_path) == []
