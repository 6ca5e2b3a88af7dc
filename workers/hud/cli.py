"""`everburn hud ...`: the commands for HUD environments."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from workers.cli.terminal import say
from workers.errors import BadInputError, UserError
from workers.hud.recipe import HudOptions, flag

app = typer.Typer(
    name="hud",
    help="Train on HUD environments.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
OUTPUT_DIR = Path(HudOptions.default("output_dir"))


def takes_hud_options(command: Callable[[HudOptions], None]) -> Callable[..., None]:
    """Give a command one command-line option for each field of HudOptions."""

    def parsed(**options: Any) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        command(HudOptions.model_validate(given))

    parameters = [_parameter(name) for name in HudOptions.model_fields]
    parsed.__name__, parsed.__doc__ = command.__name__, command.__doc__
    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return parsed


def _parameter(name: str) -> inspect.Parameter:
    field = HudOptions.model_fields[name]
    switch = field.annotation is bool
    option = typer.Option(flag(name), help=f"{field.description}{_defaults(name)}.")
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=False if switch else None,
        annotation=Annotated[bool if switch else field.annotation | None, option],  # type: ignore[operator]
    )


def _defaults(name: str) -> str:
    """` (default 8; emulator 32)`."""
    default, emulator = HudOptions.default(name), HudOptions.default(name, "emulator")
    if default is None or isinstance(default, bool):
        return ""
    differs = "" if emulator == default else f"; emulator {emulator or 'none'}"
    return f" (default {default}{differs})"


@app.command()
@takes_hud_options
def train(options: HudOptions) -> None:
    """Train a LoRA adapter on the rewards of HUD tasks, by default bundled arithmetic.

    It is a durable run like any other: `everburn status`, `stop` and `resume` work on it.
    """
    here = Path.cwd()
    options.check(here)
    _check_tasks(options, here)
    file = options.run_file(here)
    if options.calibrate:
        _calibrate(options, here)
        return
    from everburn.records.ids import RunRef
    from workers.cli.preflight import prepare_local
    from workers.cli.run import Launch, attach_or_connect, run_to_end
    from workers.cli.run_file import new_run_id
    from workers.hud.files import RecipeFiles, TolerantFiles

    prepare_local(file.config, here)
    run = RunRef(
        store=file.config.store, id=new_run_id(file.name, file.config.store, datetime.now())
    )
    files = RecipeFiles(options, run, here / options.output_dir)
    with _write_errors(options.output_dir):
        files.begin()
    output = TolerantFiles(files, options.output_dir)
    attach_or_connect(
        None,
        lambda server, stack: run_to_end(
            Launch(file, run.id, server, output.news, epilogue=output.epilogue), stack
        ),
    )


@app.command()
def files(
    output_dir: Annotated[Path, typer.Argument(metavar="[FOLDER]")] = OUTPUT_DIR,
) -> None:
    """Update the output folder of a `hud train` that was left or resumed."""
    from workers.hud.files import RecipeFiles

    with _write_errors(output_dir):
        for line in RecipeFiles.open(output_dir).epilogue(None, None):
            say(line)


@contextmanager
def _write_errors(output_dir: Path | str) -> Iterator[None]:
    from everburn.records.store import StoreError

    try:
        yield
    except (OSError, StoreError) as error:
        raise UserError(f"can't write the files in {output_dir}: {error}") from None


def _check_tasks(options: HudOptions, folder: Path) -> None:
    """Check that the task source has enough tasks; the workers read it again.

    Raises:
        BadInputError: it doesn't. UserError: the extra isn't installed.
    """
    from everburn.rollouts.dataset import DatasetError

    try:
        from everburn.hud.tasks import rows

        rows(**options.task_source("training", folder))
    except DatasetError as error:
        raise BadInputError(str(error)) from None
    except ImportError as error:
        raise UserError(str(error)) from None


def _calibrate(options: HudOptions, folder: Path) -> None:
    from workers.cli.calibrate import calibrate_here, sample_texts
    from workers.signals import sigterm_interrupts

    with sigterm_interrupts():
        found = calibrate_here(options.run_file(folder).config, folder)
    say(
        f"calibration: {len(found.rollouts)}/{found.asked} rollouts completed "
        f"reward_mean={found.reward_mean:.3f} "
        f"within_group_reward_std={found.reward_std_within_group:.3f}"
    )
    for line in sample_texts(found.rollouts[: options.debug_samples]) + found.advice():
        say(line)
