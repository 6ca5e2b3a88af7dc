"""A run's progress for the person who waits: live on a terminal, occasional lines elsewhere.

Owns how a status reads. Doesn't own where statuses come from (run.py).
"""

import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from workers.cli.report import duration
from workers.cli.terminal import print_line
from workflows.messages import Status

LINE_INTERVAL = 5.0
"""Seconds between lines about steps, in a log that somebody reads later."""
SILENCE = 60.0
"""Seconds after which a line is due though nothing has changed."""


class Progress(Protocol):
    """Where progress is shown; open from `__enter__` to `__exit__`."""

    def show(self, status: Status) -> None: ...

    def say(self, text: str) -> None:
        """A line that stays."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def progress_on(console: Console) -> "LiveProgress | LineProgress":
    return LiveProgress(console) if console.is_terminal else LineProgress(console)


def eta(status: Status) -> float | None:
    """Seconds until the last step, at the pace of the latest."""
    if status.step_seconds is None or status.total_steps <= status.step:
        return None
    return (status.total_steps - status.step) * status.step_seconds


def facts(status: Status) -> list[str]:
    """What there is to say besides steps and time."""
    found = [f"policy v{status.version}"]
    if status.reward is not None:
        found.insert(0, f"reward {status.reward:.3f}")
    found.append(f"{status.samples_in_flight} rollouts in flight")
    found.append(f"staleness capacity {status.staleness_capacity}")
    return found


def time_left(status: Status) -> str:
    """`about 0:42 left`, or nothing where it isn't known."""
    seconds = eta(status)
    return "" if seconds is None else f"about {duration(seconds)} left"


def activity(status: Status) -> str:
    """What the run does, and what it waits for."""
    waits = f" · waits for {status.waiting_for}" if status.waiting_for else ""
    return f"{status.phase}{waits}"


class LineProgress:
    """Lines for logs and pipes: when the phase outside of steps changes, and now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[int, str] | None = None
        self._at = float("-inf")

    def show(self, status: Status) -> None:
        # Within a step, phases follow each other several times a second.
        phase = "" if status.phase.startswith("step ") else status.phase
        since, news = time.monotonic() - self._at, (status.step, phase)
        changed = self._shown is None or news[1] != self._shown[1] or since > LINE_INTERVAL
        if (news != self._shown and changed) or since > SILENCE:
            self._shown, self._at = news, time.monotonic()
            steps = f"step {status.step}/{status.total_steps}" if status.total_steps else ""
            parts = [steps, *facts(status), time_left(status)] if status.step else []
            parts.append(activity(status))
            self.say(f"{duration(status.elapsed_seconds)}  {' · '.join(p for p in parts if p)}")

    def say(self, text: str) -> None:
        print_line(self._console, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class LiveProgress:
    """Three lines that are drawn anew in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(Text("starting"), console=console, refresh_per_second=4, transient=True)

    def show(self, status: Status) -> None:
        self._live.update(_drawn(status))

    def say(self, text: str) -> None:
        print_line(self._console, text)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()


def _drawn(status: Status) -> RenderableType:
    steps = Table.grid(padding=(0, 2))
    total = status.total_steps
    steps.add_row(
        ProgressBar(total=max(total, 1), completed=status.step, width=40),
        f"{status.step}/{total} steps" if total else "",
        duration(status.elapsed_seconds),
        time_left(status),
    )
    lines: list[RenderableType] = [steps, Text(" · ".join(facts(status)))]
    lines.append(Text(activity(status), style="dim"))
    if status.error is not None:
        lines.append(Text(status.error, style="red"))
    return Group(*lines)
