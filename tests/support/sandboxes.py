"""Rollouts that each create a sandbox (a folder with a process) and end in a configured way."""

import asyncio
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from everburn import RecoverableRolloutError, RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from support.waiting import until
from system import tiny_task

REAPER = "support.sandboxes:remove"


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """extras: `sandboxes`, their folder; `how`, the end of each completion."""

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun | None:
        await make(setup)
        return await ENDS[setup.extras["how"]](setup)

    return rollout_fn


def make_tiny_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """The tiny task, in sandboxes."""
    inner = tiny_task.make_rollout_fn(setup)

    async def rollout_fn(
        sample_prompt: dict[str, Any], cursor_index: int, rollout_idx: int, evaluation: bool
    ) -> RolloutRun:
        await make(setup)
        run: RolloutRun = await inner(sample_prompt, cursor_index, rollout_idx, evaluation)
        return run

    return rollout_fn


async def make(setup: RolloutSetup) -> Path:
    """Create a sandbox, which is registered before it exists."""
    folder = Path(setup.extras["sandboxes"]) / f"{os.getpid()}-{uuid.uuid4().hex}"
    await setup.sandboxes.register(REAPER, folder=str(folder))
    folder.mkdir(parents=True)
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    nowhere = asyncio.subprocess.DEVNULL
    await asyncio.create_subprocess_exec(
        *command, cwd=folder, start_new_session=True, stdout=nowhere, stderr=nowhere
    )
    with (folder.parent / "made").open("a") as file:
        file.write(f"{os.getpid()}\n")
    return folder


def remove(folder: str) -> None:
    """Kill the sandbox's processes, and delete it."""
    for process in inside(Path(folder)):
        process.kill()
        process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def refuse(**what: object) -> None:
    raise PermissionError("it isn't ours")


noted: list[int] = []


def note(number: int) -> None:
    noted.append(number)


def inside(folder: Path) -> Iterator[psutil.Process]:
    """The processes that run in a folder or below."""
    for process in psutil.process_iter():
        try:
            where = Path(process.cwd())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if where == folder or folder in where.parents:
            yield process


def left(folder: Path) -> tuple[int, int]:
    """Number of existing sandboxes, and of the processes in them."""
    return sum(each.is_dir() for each in folder.iterdir()), len(list(inside(folder)))


def made_by(folder: Path) -> list[int]:
    """The id of the process that created each sandbox, in order."""
    return [int(line) for line in (folder / "made").read_text().splitlines()]


async def succeed(setup: RolloutSetup) -> RolloutRun:
    return RolloutRun([RolloutSample.of_turn([1], [2], [-1.0], 1.0)])


async def drop(setup: RolloutSetup) -> None:
    return None


async def fail(setup: RolloutSetup) -> RolloutRun:
    raise RecoverableRolloutError("the power failed")


async def hang(setup: RolloutSetup) -> RolloutRun:
    await asyncio.Event().wait()
    return await succeed(setup)


async def wait(setup: RolloutSetup) -> RolloutRun:
    """Wait for a file `go` next to the sandboxes."""
    await until((Path(setup.extras["sandboxes"]) / "go").exists)
    return await succeed(setup)


async def die(setup: RolloutSetup) -> RolloutRun:
    """Kill the worker, the first time."""
    if len(made_by(Path(setup.extras["sandboxes"]))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return await succeed(setup)


ENDS: dict[str, Any] = {
    "succeed": succeed,
    "drop": drop,
    "fail": fail,
    "hang": hang,
    "wait": wait,
    "die": die,
}
