"""The command line `everburn`: its commands and their options.

Each command is a few lines that call its own module. Heavy imports happen inside the command that
needs them, so that an orchestrator worker stays light. Expected problems are UserErrors and
StoreErrors; they end here, as one line and an exit code.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from everburn.records.store import StoreError
from everburn.secrets import redacted
from workers.cli.terminal import console, print_line, say
from workers.connection import DEFAULT_NAMESPACE
from workers.environment import BUILD_ID_ENV, shadowed_packages
from workers.errors import BadInputError, UserError
from workers.exits import exit_code, leave
from workers.hud import cli as hud_cli

if TYPE_CHECKING:
    from workers.connection import Server
    from workers.stack.attachment import Stack

app = typer.Typer(
    name="everburn",
    help="Durable asynchronous reinforcement learning for language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(hud_cli.app)
complaints = Console(stderr=True)


Address = Annotated[
    str | None,
    typer.Option(
        envvar="TEMPORAL_ADDRESS",
        metavar="HOST:PORT",
        help="Temporal server address (default: this folder's local stack).",
    ),
]
Namespace = Annotated[str, typer.Option(envvar="TEMPORAL_NAMESPACE", help="Temporal namespace.")]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Run id (default: the open run, else the newest)."),
]
RunFolder = Annotated[
    str, typer.Argument(metavar="RUN", help="Run id in ./runs, or the run's folder or URL.")
]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's configuration file.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Change a configuration field, for example epochs=2; repeatable.",
    ),
]
RunId = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="Id of the new run (default: name and time)."),
]
Ended = Annotated[
    bool,
    typer.Option(
        "--ended", help="Confirm that the run has ended if neither its folder nor a server says so."
    ),
]
_Port = partial(typer.Option, min=1, max=65535, metavar="PORT")
TemporalPort = Annotated[
    int | None, _Port("--port", help="Port of the Temporal server (default: 7233 if free).")
]
UiPort = Annotated[int | None, _Port(help="Port of the Temporal UI (default: 8233 if free).")]
EmulatorPort = Annotated[int | None, _Port(help="Port of the emulator (default: 8780 if free).")]


@app.command()
def run(
    config: ConfigFile,
    assignments: Assignments = None,
    run_id: RunId = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    port: TemporalPort = None,
    ui_port: UiPort = None,
    emulator_port: EmulatorPort = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run would do, and start nothing.")
    ] = False,
) -> None:
    """Train: start the local stack if necessary, start the run, and follow it until it ends.

    With --address, that server and its workers do the work; nothing else is started.
    """
    from workers.cli.preflight import prepare_local
    from workers.cli.run import Launch, attach_or_connect, run_to_end
    from workers.cli.run_file import load_run_file
    from workers.stack.ports import PortWishes

    here = Path.cwd()
    file = load_run_file(config, assignments or [], here)
    if dry_run:
        from workers.cli.dry_run import describe_run
        from workers.environment import let_import_from

        let_import_from(here)
        for line in describe_run(file, run_id):
            say(line)
        return
    if address is None:
        prepare_local(file.config, here)
    attach_or_connect(
        address,
        lambda server, stack: run_to_end(Launch(file, run_id, server), stack),
        namespace,
        PortWishes(port, ui_port, emulator_port),
    )


@app.command()
def resume(
    run: RunFolder = "latest",
    assignments: Assignments = None,
    ended: Ended = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Continue a run that has ended: its weights, optimizer, rows and untrained groups.

    A run that hasn't ended continues by itself while its server and workers are up; then this
    command only follows it.
    """
    import time

    from workers.cli.resume import ended_run, is_running, resumed_state
    from workers.cli.run import Launch, attach_or_connect, run_to_end
    from workers.cli.runs import require_ended
    from workers.stack.folder import StackFolder

    found, file, checkpoint = ended_run(run, assignments or [], Path.cwd())

    def follow_or_resume(server: "Server", stack: "Stack | None") -> int:
        if asyncio.run(is_running(server, found, changes=bool(assignments), ended=ended)):
            say(f"run {found.id} hasn't ended and continues; Ctrl-C asks it to stop")
            return run_to_end(Launch(file, found.id, server, follows=True), stack)
        # Only now: a run adds to its folder until its end.
        state = resumed_state(found, file.config, time.time(), checkpoint)
        return run_to_end(Launch(file, found.id, server, state=state, resumes=True), stack)

    if address is None and not StackFolder(Path.cwd()).database.exists():
        # This folder's stack can't have the run: check before starting one.
        asyncio.run(require_ended(found, None, ended=ended))
    attach_or_connect(address, follow_or_resume, namespace)


@app.command()
def fork(
    run: RunFolder,
    step: Annotated[
        int,
        typer.Option("--at-step", min=0, metavar="K", help="Start from the state after step K."),
    ],
    run_id: RunId = None,
    assignments: Assignments = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Start a new run from the state that a run, ended or running, had after a step."""
    from workers.cli.fork import plan_fork
    from workers.cli.run import Launch, attach_or_connect, check_id_is_free, run_to_end

    plan = plan_fork(run, step, run_id, assignments or [], Path.cwd())

    def start(server: "Server", stack: "Stack | None") -> int:
        asyncio.run(check_id_is_free(server, plan.run.id))
        state = plan.make()
        say(f"forked from {plan.origin} with {len(state.producer.queue.groups)} untrained groups")
        return run_to_end(Launch(plan.file, plan.run.id, server, state=state), stack)

    attach_or_connect(address, start, namespace)


@app.command()
def dev(
    port: TemporalPort = None, ui_port: UiPort = None, emulator_port: EmulatorPort = None
) -> None:
    """Run a local stack until Ctrl-C: Temporal, the emulator and three workers."""
    from workers.signals import sigterm_interrupts
    from workers.stack.attachment import Stack
    from workers.stack.ports import PortWishes

    ports = PortWishes(port, ui_port, emulator_port)
    with sigterm_interrupts(), Stack.attach(Path.cwd(), ports, say) as stack:
        stack.take_over()
        for line in stack.description():
            say(line)
        with contextlib.suppress(KeyboardInterrupt):
            stack.follow(say)
        say("stopping the stack ...")


@app.command()
def status(
    run: RunArgument = None, address: Address = None, namespace: Namespace = DEFAULT_NAMESPACE
) -> None:
    """Show the progress of a run."""
    from workers.cli.status import show_run

    at_server(address, namespace, lambda server: show_run(server, run, console))


@app.command()
def stop(
    run: RunArgument = None,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Wait for rollouts in flight instead of cancelling them."),
    ] = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Stop a run gracefully: it finishes its step, saves, evaluates and cleans up."""
    from workers.cli.status import stop_run

    at_server(address, namespace, lambda server: stop_run(server, run, drain, console))


@app.command("list")
def list_runs(address: Address = None, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
    """List runs, newest first."""
    from workers.cli.status import show_runs

    at_server(address, namespace, lambda server: show_runs(server, console))


@app.command()
def verify(run: RunFolder = "latest") -> None:
    """Re-execute a run's ledger on a fresh trainer, and compare weights bit for bit.

    Also checks that each row has one outcome, that each group was submitted once, and that no
    recorded file has changed. Prints what couldn't be compared.
    """
    from workers.cli.run_file import find_run_folder
    from workers.cli.verify import described, verify_run
    from workers.signals import sigterm_interrupts

    here = Path.cwd()
    found = find_run_folder(run, here)
    with sigterm_interrupts():
        verified = asyncio.run(verify_run(found, here))
    for line in described(found, verified):
        say(line)


@app.command()
def calibrate(
    config: ConfigFile,
    assignments: Assignments = None,
    samples: Annotated[int, typer.Option(min=0, help="Completions to print.")] = 4,
) -> None:
    """Sample one batch from the initial policy, and say whether its rewards give a training signal.

    Starts no run and trains nothing.
    """
    from workers.cli.calibrate import calibrate_here, report, sample_texts
    from workers.cli.run_file import load_run_file
    from workers.signals import sigterm_interrupts

    here = Path.cwd()
    file = load_run_file(config, assignments or [], here)
    with sigterm_interrupts():
        found = calibrate_here(file.config, here)
    for line in [*report(found), *sample_texts(found.rollouts[:samples])]:
        say(line)


@app.command()
def reap(
    run: RunFolder = "latest",
    ended: Ended = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Clean up after a run whose workers are gone: its sandboxes, trainer job and deployment.

    Other runs clean up by themselves when they end.
    """
    from workers.cli.reap import reap_run

    done = asyncio.run(reap_run(run, address, namespace, Path.cwd(), ended=ended))
    failures = done.reaped.failures
    say(f"run {done.run.id}: {done.reaped.count} sandboxes reaped, {len(failures)} left")
    if done.provisions:
        say(done.provisions)
    left = [*failures, *([done.problem] if done.problem else [])]
    for problem in left:
        say(f"left: {problem}")
    if left:
        raise typer.Exit(1)


def at_server(
    address: str | None, namespace: str, show: "Callable[[Server], Coroutine[Any, Any, None]]"
) -> None:
    """Run `show` with the server at `address`, else with that of this folder's stack."""
    from workers.connection import Server

    asyncio.run(show(Server.find(address, namespace, Path.cwd())))


@app.command()
def worker(
    role: Annotated[
        Literal["orchestrator", "rollout", "trainer"],
        typer.Argument(metavar="ROLE", help="What the worker serves."),
    ],
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    slots: Annotated[
        int, typer.Option(min=1, help="Most rollouts at once in a rollout worker.")
    ] = 512,
    build: Annotated[
        str | None,
        typer.Option(
            "--build-id",
            envvar=BUILD_ID_ENV,
            metavar="ID",
            help="Version of this worker's code; see docs/operations.md.",
        ),
    ] = None,
) -> None:
    """Run a worker until SIGTERM: for workflows, user code, or trainer sessions."""
    from workers.cli.worker import serve

    serve(role, address, namespace, slots, Path.cwd(), build or None)


@app.command()
def emulator(
    home: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for its checkpoints.")
    ] = Path(".everburn/emulator"),
    port: Annotated[int, _Port(help="Port to serve on.")] = 8780,
    enable_faults: Annotated[
        bool, typer.Option("--enable-faults", help="Let clients inject failures, for tests.")
    ] = False,
    worst: Annotated[
        bool,
        typer.Option(
            "--worst", help="Assume the worst case where the live service's behavior is unknown."
        ),
    ] = False,
) -> None:
    """Serve the Fireworks emulator on 127.0.0.1: no account, no GPU, no network."""
    from workers.stack.ports import Wish, choose

    choose(Wish("the emulator", port, "--port", asked=port))
    from everburn.emulator.http.server import EmulatorSettings, serve
    from everburn.emulator.unknowns import BEST_CASE, WORST_CASE
    from workers import dotenv
    from workers.environment import let_import_from

    dotenv.load(Path.cwd())
    let_import_from(Path.cwd())  # recipes of base models
    settings = EmulatorSettings(
        home=home.absolute(),
        enable_faults=enable_faults,
        unknowns=WORST_CASE if worst else BEST_CASE,
    )
    serve(settings, port)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Check what this configuration needs.")
    ] = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    live: Annotated[
        bool,
        typer.Option("--live", help="Check key, account and model at the service, free of charge."),
    ] = False,
) -> None:
    """Check this machine, and print what is missing and how to get it."""
    from workers.cli.doctor import findings
    from workers.connection import Server

    if live and config is None:
        raise BadInputError("--live checks what a run needs: give its CONFIG")
    server = None if address is None else Server(address, namespace)
    missing = False
    for finding in findings(Path.cwd(), config, server, live=live):
        say(str(finding))
        missing = missing or finding.verdict == "missing"
    raise typer.Exit(int(missing))


def main() -> None:
    """Run a command and end the process."""
    try:
        run_command()
    except SystemExit as error:
        leave(exit_code(error))
    leave(0)


def run_command() -> None:
    """Run the command in the arguments; ends with SystemExit."""
    shadowed = shadowed_packages()
    if shadowed and sys.argv[1:2] != ["doctor"]:
        # A command would import a mixture of their modules and ours.
        for name, text in shadowed.items():
            complain(f"package {name}: {text}")
        sys.exit(UserError.exit_code)
    try:
        app(prog_name="everburn")
    except (UserError, StoreError) as error:
        complain(str(error))
        sys.exit(error.exit_code if isinstance(error, UserError) else UserError.exit_code)
    except ImportError as error:
        complain(f"{error}: this environment lacks a package; `everburn doctor` says which")
        sys.exit(UserError.exit_code)


def complain(text: str) -> None:
    print_line(complaints, redacted(f"error: {text}"))


if __name__ == "__main__":
    main()
