"""`everburn list`, `status` and `stop`."""

from datetime import datetime

from rich.console import Console
from rich.table import Table

from workers.cli.progress import activity, facts
from workers.cli.report import duration, metrics_table
from workers.cli.runs import Run, failure_of, find_run, list_runs, request_stop, run_status
from workers.cli.terminal import print_line
from workers.connection import Server


async def show_runs(server: Server, console: Console) -> None:
    client = await server.connect()
    runs = await list_runs(client)
    if not runs:
        start = f"everburn run CONFIG{server.everburn_options}"
        print_line(console, f"no runs yet: start one with `{start}`")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("run", "state", "started", "took"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "reward"):
        table.add_column(name, justify="right")
    for run in runs:
        started = run.started.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        step = "" if run.step is None else str(run.step)
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        table.add_row(run.id, run.state, started, _took(run), step, reward)
    console.print(table)


async def show_run(server: Server, run_id: str | None, console: Console) -> None:
    """Raises UserError: there is no such run, or no orchestrator worker answers."""
    client = await server.connect()
    run = await find_run(server, client, run_id)
    status = await run_status(server, client, run)
    lines = [
        f"run {run.id}: {run.state}, {duration(status.elapsed_seconds)}",
        activity(status),
        f"step {status.step} of about {status.total_steps}, "
        f"{status.rows_resolved} of {status.rows_total} rows resolved",
        " · ".join(facts(status)),
    ]
    if status.stall:
        lines.append(f"stalled: {status.stall}")
    if status.origin is not None:
        lines.append(f"forked from {status.origin}")
    failure = None if run.open else await failure_of(client, run.id)
    if failure is not None:
        lines.append(f"failed: {failure}")
    elif status.error is not None:
        lines.append(f"error: {status.error}")
    if status.recovered is not None:
        lines.append(f"recovered: {status.recovered.text}")
    if status.checkpoint is not None:
        lines.append(f"checkpoint: {status.checkpoint}")
    lines += [f"note: {note}" for note in status.notes]
    if (page := server.page(run.id)) is not None:
        lines.append(page)
    lines.append(f"run folder: {status.folder}")
    for line in lines:
        print_line(console, line)
    table = metrics_table(status.evaluations)
    if table is not None:
        console.print(table)


async def stop_run(server: Server, run_id: str | None, drain: bool, console: Console) -> None:
    client = await server.connect()
    run = await find_run(server, client, run_id)
    if not run.open:
        print_line(console, f"run {run.id} has already ended: {run.state}")
        return
    await request_stop(client, run.id, drain)
    status = f"everburn status {run.id}{server.everburn_options}"
    print_line(console, f"run {run.id} is stopping gracefully: see `{status}`")


def _took(run: Run) -> str:
    end = run.ended or datetime.now(run.started.tzinfo)
    return duration((end - run.started).total_seconds())
