"""`everburn doctor`: checks of what a machine needs to run Everburn.

Each check says how to fix a problem. Nothing is started or changed.
"""

import asyncio
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everburn.config import RunConfig
from everburn.records.store import ArtifactStore
from everburn.trainers.backends import MissingKeyError, api_key
from workers import dotenv
from workers.cli.run_file import load_run_file, missing_datasets
from workers.connection import Server
from workers.environment import OUR_FOLDER, OUR_PACKAGES, shadowed_packages
from workers.errors import UserError
from workers.stack.folder import StackFolder
from workers.stack.ports import PortWishes, is_free, occupant
from workers.stack.temporal_server import binary_version, find_binary

PYTHONS = ((3, 11), (3, 12))
NEEDED_DISK = 2.0
"""GB: a base model, and histories and rollouts of some runs."""

Verdict = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """The result of a check. `missing` makes the command fail; a `note` doesn't."""

    verdict: Verdict
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.verdict:8}{self.subject}: {self.text}"


def findings(
    folder: Path, config: Path | None, server: Server | None, *, live: bool = False
) -> Iterator[Finding]:
    """All checks. live: ask the service too."""
    yield check_python()
    yield from check_packages()
    if shadowed_packages():
        return  # other checks might use a shadowing package
    yield check_temporal()
    yield from check_ports(folder)
    yield check_disk(folder)
    yield check_torch()
    if server is not None:
        yield asyncio.run(check_server(server))
    if config is not None:
        yield from check_run(config, folder, live=live)


def check_python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] in PYTHONS:
        return Finding("ok", "Python", f"{version} at {sys.executable}")
    return Finding(
        "missing", "Python", f"{version}: create the environment with Python 3.11 or 3.12"
    )


def check_packages() -> Iterator[Finding]:
    found = shadowed_packages()
    for name in OUR_PACKAGES:
        if name in found:
            yield Finding("missing", f"package {name}", found[name])
        else:
            yield Finding("ok", f"package {name}", str(OUR_FOLDER / name))


def check_temporal() -> Finding:
    try:
        binary = find_binary()
        version = ".".join(map(str, binary_version(binary)))
    except UserError as error:
        return Finding("missing", "Temporal", str(error))
    return Finding("ok", "Temporal", f"{version} at {binary}")


def check_ports(folder: Path) -> Iterator[Finding]:
    state = StackFolder(folder).find()
    if state is not None:
        yield Finding("ok", "local stack", f"runs at {state.temporal}, UI {state.ui}")
        return
    for wish in PortWishes().wishes():
        subject = f"port {wish.usual}"
        if is_free(wish.usual):
            yield Finding("ok", subject, f"free for {wish.purpose}")
        else:
            by = occupant(wish.usual) or "another process"
            yield Finding(
                "note",
                subject,
                f"in use by {by}: {wish.purpose} will use another, or that of {wish.option}",
            )


def check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 1e9
    if free >= NEEDED_DISK:
        return Finding("ok", "disk", f"{free:.0f} GB free at {folder}")
    return Finding(
        "missing",
        "disk",
        f"{free:.1f} GB free at {folder}, {NEEDED_DISK:.0f} GB needed: free some space",
    )


def check_torch() -> Finding:
    started = time.monotonic()
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("missing", "torch", f"{error}: pip install -c constraints.txt torch")
    took = time.monotonic() - started
    return Finding(
        "ok",
        "torch",
        f"{torch.__version__}, imported in {took:.1f} s, {torch.get_num_threads()} threads on "
        f"{os.cpu_count()} cores (the emulator uses one)",
    )


async def check_server(server: Server) -> Finding:
    try:
        await server.connect()
    except UserError as error:
        return Finding("missing", "Temporal server", str(error))
    return Finding("ok", "Temporal server", f"{server.address}, namespace {server.namespace}")


def check_run(path: Path, folder: Path, *, live: bool = False) -> Iterator[Finding]:
    try:
        dotenv.load(folder)
        file = load_run_file(path, [], folder)
    except UserError as error:
        yield Finding("missing", "configuration", str(error))
        return
    yield Finding("ok", "configuration", str(path))
    yield from (Finding("note", "configuration", text) for text in file.config.warnings())
    for path_of_dataset in missing_datasets(file.config):
        yield Finding("missing", "dataset", f"there is no file {path_of_dataset}")
    yield check_store(file.config)
    yield _check_key(file.config)
    if live:
        from workers.cli.live_checks import live_answers

        yield from (Finding(*answer) for answer in live_answers(file.config))


def check_store(config: RunConfig) -> Finding:
    """Check that this environment supports the store's URL; sends no request."""
    try:
        ArtifactStore(config.store)
    except (ValueError, ImportError) as error:
        return Finding("missing", "store", f"{config.store}: {error}")
    return Finding("ok", "store", config.store)


def _check_key(config: RunConfig) -> Finding:
    try:
        api_key(config)
    except MissingKeyError as error:
        return Finding("missing", "API key", str(error))
    if config.local:
        return Finding("ok", "API key", "none needed")
    return Finding("ok", "API key", f"in {config.api_key_env}")
