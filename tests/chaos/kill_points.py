"""Named points in Everburn's processes at which a test makes them die, stop, or meet a full disk.

Runs inside the processes (tests/chaos/process.py), whose functions it wraps; product code doesn't
depend on it. A plan is a file in the folder of EVERBURN_CHAOS, so that tests can make plans for
running processes. The first process that reaches a planned point takes the plan; from then on the
plan is called `<name>.hit`.

A point is `before CALL` or `after CALL`. The calls of the trainer session: `open`,
`forward_backward`, `optim_step`, `publish NAME`, `save_checkpoint NAME`, `load_checkpoint PATH`,
`promote ID`, `probe`; of a recovery: `replay STEP`; of a dedicated run's provisioning: `advance`,
`clean_up` and `hotload NAME`; of the store: `put KEY` and `append KEY`; of the orchestrator:
`continue_as_new` and `amend INDEX`, an evaluation's addition to the metrics; of the emulator:
`serve OPERATION` and `serve checkpoint NAME`. Planned points are patterns, as in a shell.
"""

import contextlib
import errno
import fnmatch
import functools
import inspect
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

FOLDER = "EVERBURN_CHAOS"

Name = Callable[..., str]
"""The name of a call, made of its arguments."""


@dataclass(frozen=True)
class Plan:
    """An event at a point. skip: how often processes pass the point first. times: for a full disk,
    how often it fails the call.

    `kill` is a SIGKILL of the process itself, `freeze` a SIGSTOP; `full` fails the call as a full
    disk does.
    """

    point: str
    action: Literal["kill", "freeze", "full"] = "kill"
    skip: int = 0
    times: int = 1


@dataclass(frozen=True)
class Holder:
    """The process of a trainer session. began: distinguishes it from a later one with its pid."""

    pid: int
    began: float

    @property
    def is_running(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).create_time() == self.began
        return False


class Points:
    """The plans of a folder, as seen from one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._passed: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Execute the plan for this point, if there is one."""
        for file, plan in self._plans():
            if not fnmatch.fnmatchcase(point, plan.point):
                continue
            self._passed[file.name] += 1
            if self._passed[file.name] > plan.skip and _take(file, plan):
                _act(plan, point)

    def _plans(self) -> Iterator[tuple[Path, Plan]]:
        for file in sorted(self._folder.glob("*.plan")):
            try:
                yield file, Plan(**json.loads(file.read_text()))
            except FileNotFoundError:
                continue  # another process has taken it


def _take(file: Path, plan: Plan) -> bool:
    """Whether this process is the one that takes the plan."""
    try:
        file.rename(file.with_suffix(".hit"))
    except FileNotFoundError:
        return False
    if plan.times > 1:
        again = Plan(plan.point, plan.action, 0, plan.times - 1)
        write_plan(file, again)
    return True


def _act(plan: Plan, point: str) -> None:
    match plan.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)


def write_plan(file: Path, plan: Plan) -> None:
    """Write a plan for the processes to find."""
    _write(file, asdict(plan))


def _write(file: Path, values: dict[str, Any]) -> None:
    """Write a file atomically."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(values))
    draft.rename(file)


def install() -> None:
    """Wrap the functions that this process may call."""
    points = Points(Path(os.environ[FOLDER]))
    _wrap_store(points)
    _wrap_workflows(points)
    from everburn.records import metrics

    _wrap(metrics, "amend", points, lambda store, stream, index, values: f"amend {index}")


def install_for_trainer() -> None:
    """Wrap the trainer session, which imports the SDK."""
    points = Points(Path(os.environ[FOLDER]))
    from everburn.records import replay
    from everburn.trainers.dedicated import DedicatedTrainer
    from everburn.trainers.hotload import Hotloader
    from everburn.trainers.jobs import RunProvisioning
    from everburn.trainers.serverless import ServerlessTrainer

    replay.replay_step = _wrapped(replay.replay_step, points, lambda s, t, e: f"replay {e.step}")
    opened = _wrapped(ServerlessTrainer._open, points, lambda config: "open")
    ServerlessTrainer._open = staticmethod(opened)  # type: ignore[method-assign]
    opened = _wrapped(DedicatedTrainer._open_for, points, lambda *order: "open")
    DedicatedTrainer._open_for = staticmethod(opened)  # type: ignore[method-assign]
    for name in ("forward_backward", "optim_step", "probe"):
        _wrap(ServerlessTrainer, name, points, _constant(name))
    for name in ("publish", "save_checkpoint", "load_checkpoint"):
        _wrap(ServerlessTrainer, name, points, _with_argument(name))
    _wrap(ServerlessTrainer, "promote", points, lambda self, *order, **named: f"promote {order[1]}")
    for name in ("advance", "clean_up"):
        _wrap(RunProvisioning, name, points, _constant(name))
    _wrap(Hotloader, "load", points, lambda self, identity, *rest: f"hotload {identity}")
    _note_holders(Path(os.environ[FOLDER]))


def _note_holders(folder: Path) -> None:
    """Record which process holds a session, in `<session>.holder`."""
    from everburn.trainers.serverless import ServerlessTrainer

    begin = ServerlessTrainer.__init__

    def begin_and_note(self: ServerlessTrainer, service: Any, *rest: Any) -> None:
        begin(self, service, *rest)
        me = Holder(os.getpid(), psutil.Process().create_time())
        _write(folder / f"{service.holder.get_session_id()}.holder", asdict(me))

    ServerlessTrainer.__init__ = begin_and_note  # type: ignore[method-assign]


def sessions_of_the_dead(folder: Path) -> set[str]:
    """The sessions whose holder process has died, so that it sends no heartbeats for them."""
    return {file.stem for file in folder.glob("*.holder") if not _holder(file).is_running}


def _holder(file: Path) -> Holder:
    return Holder(**json.loads(file.read_text()))


def install_for_emulator() -> None:
    points = Points(Path(os.environ[FOLDER]))
    from everburn.emulator.managed import Managed
    from everburn.emulator.service import Emulator
    from everburn.emulator.training.checkpoints import CheckpointStore

    _wrap(Emulator, "_run", points, lambda self, model, operation: f"serve {operation.name}")
    _wrap(Emulator, "_create", points, lambda *arguments: "serve create_model")
    _wrap(CheckpointStore, "save", points, lambda self, ref, *rest: f"serve checkpoint {ref.name}")
    for name in ("create_job", "create_deployment", "hotload", "delete_job", "delete_deployment"):
        _wrap(Managed, name, points, _constant(f"serve {name}"))


def _wrap_store(points: Points) -> None:
    from everburn.records import store

    # Below the translation of errors, so that a full disk raises the operating system's error.
    write = store._write_atomically

    def write_at_point(path: Path, data: bytes, *, once: bool) -> None:
        points.reach(f"before put {_key(path)}")
        write(path, data, once=once)
        points.reach(f"after put {_key(path)}")

    append = store.ArtifactStore.append_lines

    def append_at_point(self: store.ArtifactStore, key: str, lines: list[str]) -> None:
        try:
            points.reach(f"before append {key}")
        except OSError as error:
            raise store.StoreFullError(f"can't write {key}: {error.strerror}") from error
        append(self, key, lines)
        points.reach(f"after append {key}")

    store._write_atomically = write_at_point
    store.ArtifactStore.append_lines = append_at_point  # type: ignore[method-assign]


def _wrap_workflows(points: Points) -> None:
    from temporalio.bridge.worker import Worker

    complete = Worker.complete_workflow_activation

    async def complete_at_point(self: Worker, completion: Any) -> None:
        ends = any(
            command.HasField("continue_as_new_workflow_execution")
            for command in completion.successful.commands
        )
        if ends:
            points.reach("before continue_as_new")
        await complete(self, completion)
        if ends:
            points.reach("after continue_as_new")

    setattr(Worker, "complete_workflow_activation", complete_at_point)  # noqa: B010


def _wrap(owner: Any, name: str, points: Points, call: Name) -> None:
    setattr(owner, name, _wrapped(getattr(owner, name), points, call))


def _wrapped(function: Callable[..., Any], points: Points, call: Name) -> Callable[..., Any]:
    """Wrap a function in its two points; for an awaitable, the second follows its result."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        point = call(*arguments, **named)
        points.reach(f"before {point}")
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            return _awaited(result, point)
        points.reach(f"after {point}")
        return result

    async def _awaited(result: Any, point: str) -> Any:
        value = await result
        points.reach(f"after {point}")
        return value

    return wrapper


def _constant(name: str) -> Name:
    return lambda *arguments, **named: name


def _with_argument(name: str) -> Name:
    return lambda self, argument: f"{name} {argument}"


def _key(path: Path) -> str:
    """A file's key in its run's folder, which is the one with an owner file."""
    for folder in path.parents:
        if (folder / "owner.json").exists():
            return str(path.relative_to(folder))
    return path.name
