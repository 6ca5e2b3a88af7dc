from typing import Any

from rich.console import Console

from workers.cli.progress import eta, facts, progress_on
from workflows.messages import Status


def status(**changes: Any) -> Status:
    values: dict[str, Any] = {
        "run": "sums-1",
        "folder": "runs/sums-1",
        "phase": "step 13: training",
        "waiting_for": "gradients",
        "stall": "",
        "step": 12,
        "total_steps": 40,
        "version": 12,
        "rows_total": 320,
        "rows_resolved": 96,
        "groups_in_flight": 8,
        "samples_in_flight": 61,
        "groups_ready": 3,
        "batch_size": 8,
        "staleness_capacity": 64,
        "reward": 0.4125,
        "step_seconds": 1.5,
        "elapsed_seconds": 21.0,
        "evaluations": {},
        "lease_epoch": 1,
        "checkpoint": None,
        "saved": [],
        "model": None,
        "error": None,
        "origin": None,
        "notes": [],
    }
    return Status.model_validate(values | changes)


def shown(*statuses: Status) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture, progress_on(console) as progress:
        for each in statuses:
            progress.show(each)
    return capture.get().splitlines()


def test_the_time_left_is_the_remaining_steps_at_the_latest_speed() -> None:
    assert eta(status()) == 28 * 1.5
    assert eta(status(step_seconds=None)) is None
    assert eta(status(step=40)) is None


def test_a_line_with_all_facts() -> None:
    (line,) = shown(status())
    assert line == (
        "0:21  step 12/40 · reward 0.412 · policy v12 · 61 rollouts in flight · "
        "staleness capacity 64 · about 0:42 left · step 13: training · waits for gradients"
    )


def test_unknown_facts_are_omitted() -> None:
    assert facts(status(reward=None, step_seconds=None)) == [
        "policy v12",
        "61 rollouts in flight",
        "staleness capacity 64",
    ]


def test_phases_are_printed_at_once_and_steps_at_intervals() -> None:
    lines = shown(
        status(step=0, total_steps=0, phase="starting", waiting_for="the run's folder"),
        status(step=0, total_steps=0, phase="preparing", waiting_for="a rollout worker"),
        status(step=0, phase="step 1: collecting", waiting_for="8 more prompt groups"),
        status(step=0, phase="step 1: training"),
        status(step=1),
        status(step=2),
        status(step=40, phase="finishing", waiting_for="the final evaluation"),
    )
    assert [line.split("  ", 1)[1].split(" · ")[0] for line in lines] == [
        "starting",
        "preparing",
        "step 1: collecting",
        "step 40/40",
    ]


def test_a_terminal_shows_the_same_facts_and_the_error_of_a_held_run() -> None:
    console = Console(width=200, force_terminal=True)
    with console.capture() as capture, progress_on(console) as progress:
        progress.show(status(error="EntrypointError: no module task"))
        progress.say("rollout ended")
    text = capture.get()
    for part in ("12/40 steps", "reward 0.412", "step 13: training", "EntrypointError", "rollout"):
        assert part in text
