"""The command line `everburn`: its commands, their options, and what they print first.

Each command is a few lines over a module of its own noun; heavy imports happen inside the command
that needs them, so that an orchestrator worker stays light. Expected problems are UserErrors, or a
store's; they end here, as one line and an exit code.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from everburn.records.store import StoreError
from everburn.secrets import redacted
from workers.cli.terminal import console, print_line, say
from workers.connection import DEFAULT_NAMESPACE
from workers.environment import BUILD_ID_ENV, intruders
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
        help="Of a Temporal server; by default the one of this folder's stack.",
    ),
]
Namespace = Annotated[str, typer.Option(envvar="TEMPORAL_NAMESPACE", help="On that server.")]
RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="By default the one that is open, else the newest."),
]
RunFolder = Annotated[
    str, typer.Argument(metavar="RUN", help="Its id below ./runs, or its folder or URL.")
]
TemporalPort = Annotated[
    int | None,
    typer.Option(
        "--port", min=1, max=65535, metavar="PORT", help="Of the Temporal server; usually 7233."
    ),
]
UiPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", help="Of the Temporal UI; usually 8233."),
]
EmulatorPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, metavar="PORT", help="Of the emulator; usually 8780."),
]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's JSON file.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Change a field, for example epochs=2; repeatable."
        ),
    ] = None,
    run_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="By default the file's name and the time."),
    ] = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    port: TemporalPort = None,
    ui_port: UiPort = None,
    emulator_port: EmulatorPort = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run would do, and do none of it.")
    ] = False,
) -> None:
    """Train: start what isn't running, start the run, and stay until it has ended.

    With --address nothing is started: that server and its workers do the work.
    """
    from workers.cli.preflight import check_local, make_base_model
    from workers.cli.run import Launch, stay_with
    from workers.cli.run_file import load_run_file
    from workers.connection import Server
    from workers.signals import sigterm_interrupts
    from workers.stack.attachment import Stack
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
    if address is not None:
        server = Server(address, namespace)
        raise typer.Exit(stay_with(Launch(file, run_id, server)))
    check_local(file.config, here)
    with sigterm_interrupts():
        make_base_model(file.config, here)
        with Stack.attach(here, PortWishes(port, ui_port, emulator_port), say) as stack:
            server = Server.of_stack(stack.state)
            code = stay_with(Launch(file, run_id, server, stack.news), stack)
    raise typer.Exit(code)


@app.command()
def resume(
    run: RunFolder = "latest",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field; repeatable."),
    ] = None,
    ended: Annotated[
        bool,
        typer.Option(
            "--ended", help="The run has ended, although neither its folder nor its server says so."
        ),
    ] = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Continue a run that has ended: its weights, optimizer, rows and untrained groups.

    A run that hasn't ended continues by itself while its server and workers are up: then this
    command only follows it.
    """
    import time

    from workers.cli.resume import ended_run, is_running, resumed_state
    from workers.cli.run import Launch, stay_with
    from workers.cli.runs import require_ended
    from workers.connection import Server
    from workers.signals import sigterm_interrupts
    from workers.stack.attachment import Stack
    from workers.stack.folder import StackFolder
    from workers.stack.ports import PortWishes

    found, file, checkpoint = ended_run(run, assignments or [], Path.cwd())

    def go_on(server: Server, stack: "Stack | None" = None) -> int:
        news = stack.news if stack is not None else list
        if asyncio.run(is_running(server, found, changes=bool(assignments), ended=ended)):
            say(f"run {found.id} hasn't ended: it goes on, and Ctrl-C asks it to stop")
            return stay_with(Launch(file, found.id, server, news, follows=True), stack)
        # Only now: until its end a run adds to its folder.
        state = resumed_state(found, file.config, time.time(), checkpoint)
        return stay_with(Launch(file, found.id, server, news, state, goes_on=True), stack)

    if address is not None:
        raise typer.Exit(go_on(Server(address, namespace)))
    if not StackFolder(Path.cwd()).database.exists():
        # No stack of this folder can have the run: it is refused before one is started.
        asyncio.run(require_ended(found, None, ended=ended))
    with sigterm_interrupts(), Stack.attach(Path.cwd(), PortWishes(), say) as stack:
        code = go_on(Server.of_stack(stack.state), stack)
    raise typer.Exit(code)


@app.command()
def fork(
    run: RunFolder,
    step: Annotated[
        int,
        typer.Option("--at-step", min=0, metavar="K", help="Begin from the state after step K."),
    ],
    run_id: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="Of the new run; by default by step and time."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field; repeatable."),
    ] = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Start a new run from the state that a run, ended or running, had after a step."""
    from workers.cli.fork import plan_fork
    from workers.cli.run import Launch, check_id_is_free, stay_with
    from workers.connection import Server
    from workers.signals import sigterm_interrupts
    from workers.stack.attachment import Stack
    from workers.stack.ports import PortWishes

    plan = plan_fork(run, step, run_id, assignments or [], Path.cwd())

    def start(server: Server, stack: "Stack | None" = None) -> int:
        asyncio.run(check_id_is_free(server, plan.run.id))
        state = plan.make()
        say(f"forked from {plan.origin}: {len(state.queue.groups)} untrained groups come along")
        news = stack.news if stack is not None else list
        return stay_with(Launch(plan.file, plan.run.id, server, news, state), stack)

    if address is not None:
        raise typer.Exit(start(Server(address, namespace)))
    with sigterm_interrupts(), Stack.attach(Path.cwd(), PortWishes(), say) as stack:
        code = start(Server.of_stack(stack.state), stack)
    raise typer.Exit(code)


@app.command()
def dev(
    port: TemporalPort = None, ui_port: UiPort = None, emulator_port: EmulatorPort = None
) -> None:
    """Keep a local stack up: Temporal, the emulator and three workers, until Ctrl-C."""
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
    """Show where a run is."""
    from workers.cli.status import show_run

    at_server(address, namespace, lambda server: show_run(server, run, console))


@app.command()
def stop(
    run: RunArgument = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="Await rollouts in flight instead of cancelling them.")
    ] = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Stop a run gracefully: it finishes its step, saves, evaluates and cleans up."""
    from workers.cli.status import stop_run

    at_server(address, namespace, lambda server: stop_run(server, run, drain, console))


@app.command("list")
def list_runs(address: Address = None, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
    """List the runs, the newest first."""
    from workers.cli.status import show_runs

    at_server(address, namespace, lambda server: show_runs(server, console))


@app.command()
def verify(
    run: RunFolder = "latest",
) -> None:
    """Re-execute a run's ledger on a fresh trainer, and compare weights bit for bit.

    Also checks that each row has one fate, that each group was submitted once, and that every
    recorded file is as it was recorded. Says what couldn't be compared.
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
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's JSON file.")],
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a field; repeatable."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Completions to print.")] = 4,
) -> None:
    """Roll out one batch from the initial policy, and say whether there is anything to learn.

    Starts no run, and trains nothing.
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
    ended: Annotated[
        bool,
        typer.Option(
            "--ended", help="It has ended, though neither its folder nor a server here says so."
        ),
    ] = False,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """End what a run left behind: sandboxes and processes of its rollouts, its trainer job and
    deployment.

    A run does so itself at its end. This is for one whose workers are gone.
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
    """Show something of the server that the options mean."""
    from workers.connection import Server

    asyncio.run(show(Server.find(address, namespace, Path.cwd())))


@app.command()
def worker(
    role: Annotated[Literal["orchestrator", "rollout", "trainer"], typer.Argument()],
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    slots: Annotated[int, typer.Option(min=1, help="Rollouts at once, of a rollout worker.")] = 512,
    build: Annotated[
        str | None,
        typer.Option(
            "--build-id",
            envvar=BUILD_ID_ENV,
            metavar="ID",
            help="Of these workers' code, so that runs can outlive it: see docs/operations.md.",
        ),
    ] = None,
) -> None:
    """Serve a Temporal server until SIGTERM: workflows, user code, or trainer sessions."""
    from workers.cli.worker import serve

    serve(role, address, namespace, slots, Path.cwd(), build or None)


@app.command()
def emulator(
    home: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where its checkpoints are kept.")
    ] = Path(".everburn/emulator"),
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="PORT")] = 8780,
    enable_faults: Annotated[
        bool, typer.Option("--enable-faults", help="Let tests plan failures; see docs.")
    ] = False,
    worst: Annotated[
        bool,
        typer.Option("--worst", help="Do the worst that the live service may do, for all we know."),
    ] = False,
) -> None:
    """Serve the local Fireworks on 127.0.0.1: no account, no GPU, no network."""
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
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]")] = None,
    address: Address = None,
    namespace: Namespace = DEFAULT_NAMESPACE,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Ask the service for key, account and model, without spending."
        ),
    ] = False,
) -> None:
    """Say what is missing here and how to get it, for CONFIG if one is given."""
    from workers.cli.doctor import examine

    if live and config is None:
        raise BadInputError("--live asks for what a run needs: name its CONFIG")
    raise typer.Exit(examine(Path.cwd(), config, address, namespace, console, live=live))


def main() -> None:
    """The process of a command."""
    try:
        run_command()
    except SystemExit as ending:
        leave(exit_code(ending))
    leave(0)


def run_command() -> None:
    """Run what the arguments say; ends by SystemExit."""
    found = intruders()
    if found and sys.argv[1:2] != ["doctor"]:
        # Some of their modules would be taken for ours, and some not.
        for name, text in found.items():
            complain(f"package {name}: {text}")
        sys.exit(UserError.exit_code)
    try:
        app(prog_name="everburn")
    except UserError as error:
        complain(str(error))
        sys.exit(error.exit_code)
    except StoreError as error:
        complain(str(error))
        sys.exit(UserError.exit_code)
    except ImportError as error:
        complain(f"{error}: this environment lacks something; `everburn doctor` says what")
        sys.exit(UserError.exit_code)


def complain(text: str) -> None:
    print_line(complaints, redacted(f"error: {text}"))


if __name__ == "__main__":
    main()
