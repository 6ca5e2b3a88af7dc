"""A run's progress: live on a terminal, occasional lines elsewhere.

Owns the text of a status. Doesn't own where statuses come from (run.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from workers.cli.report import duration
from workers.cli.terminal import print_line
from workflows.messages import Status

LINE_INTERVAL = 5.0
"""Seconds between lines about steps."""
SILENCE = 60.0
"""Seconds after which a line is printed even if nothing has changed."""


class Progress(Protocol):
    def show(self, status: Status) -> None: ...

    def say(self, text: str) -> None:
        """Print a line that stays."""


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Show progress on `console` for the duration of the block."""
    if not console.is_terminal:
        yield LineProgress(console)
        return
    with Live(Text("starting"), console=console, refresh_per_second=4, transient=True) as live:
        yield LiveProgress(console, live)


def eta(status: Status) -> float | None:
    """Seconds until the end of the last step, at the speed of the latest."""
    if status.step_seconds is None or status.total_steps <= status.step:
        return None
    return (status.total_steps - status.step) * status.step_seconds


def facts(status: Status) -> list[str]:
    """Short facts besides steps and time."""
    found = [f"policy v{status.version}"]
    if status.reward is not None:
        found.insert(0, f"reward {status.reward:.3f}")
    found.append(f"{status.samples_in_flight} rollouts in flight")
    found.append(f"staleness capacity {status.staleness_capacity}")
    return found


def time_left(status: Status) -> str:
    """`about 0:42 left`, or empty if unknown."""
    seconds = eta(status)
    return "" if seconds is None else f"about {duration(seconds)} left"


def activity(status: Status) -> str:
    """The run's phase, and what it waits for."""
    waits = f" · waits for {status.waiting_for}" if status.waiting_for else ""
    return f"{status.phase}{waits}"


class LineProgress:
    """Lines for logs and pipes: for each change of phase outside of steps, and at intervals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: tuple[int, str] | None = None
        self._at = float("-inf")

    def show(self, status: Status) -> None:
        # Within a step, the phase changes several times a second.
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


class LiveProgress:
    """Three lines, redrawn in place."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console = console
        self._live = live

    def show(self, status: Status) -> None:
        self._live.update(_drawn(status))

    def say(self, text: str) -> None:
        print_line(self._console, text)


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
