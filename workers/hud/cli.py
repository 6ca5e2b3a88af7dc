"""`everburn hud ...`: the commands for HUD environments, and their options."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from workers.cli.terminal import say
from workers.errors import BadInputError, UserError
from workers.hud.recipe import EMULATOR, FIREWORKS, Backend, HudOptions, LossFn

app = typer.Typer(
    name="hud",
    help="Train on HUD environments.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def _default(name: str) -> str:
    """The defaults of an option, for its help."""
    recipe, local = getattr(FIREWORKS, name), getattr(EMULATOR, name)
    return f"default {recipe}" if recipe == local else f"default {recipe}; emulator {local}"


def _option(name: str, text: str) -> Any:
    return typer.Option(help=f"{text} ({_default(name)}).", show_default=False)


@app.command()
def train(
    backend: Annotated[Backend, typer.Option(help="Where the model is trained.")] = "fireworks",
    base_model: Annotated[str | None, _option("base_model", "Base model")] = None,
    tokenizer_model: Annotated[
        str | None, _option("tokenizer_model", "Hugging Face id or folder of its tokenizer")
    ] = None,
    renderer: Annotated[str | None, _option("renderer", "How prompts become tokens")] = None,
    lora_rank: Annotated[int | None, _option("lora_rank", "LoRA rank")] = None,
    max_seq_len: Annotated[int | None, _option("max_seq_len", "Prompt and answer together")] = None,
    learning_rate: Annotated[float | None, _option("learning_rate", "Of Adam")] = None,
    temperature: Annotated[float, typer.Option(help="Of training; evaluations use 0.")] = 1.0,
    sampling_timeout: Annotated[float, typer.Option(help="Seconds for one sample.")] = 600.0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 5,
    resume_from: Annotated[
        str | None, typer.Option(metavar="PATH", help="Training checkpoint to start from.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tasks, their split, and the adapter.")] = 0,
    output_dir: Annotated[
        str, typer.Option(metavar="FOLDER", help="Of the recipe's files.")
    ] = "runs/fireworks-serverless",
    taskset: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task set on the HUD platform.")
    ] = None,
    tasks_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Local tasks: .py, folder, .json or .jsonl.")
    ] = None,
    env_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="The environment of --tasks-file.")
    ] = None,
    steps: Annotated[int | None, _option("steps", "Optimizer steps")] = None,
    tasks_per_step: Annotated[int | None, _option("tasks_per_step", "Tasks, each step")] = None,
    group_size: Annotated[int | None, _option("group_size", "Rollouts of a task")] = None,
    max_tokens: Annotated[int | None, _option("max_tokens", "Tokens of an answer")] = None,
    max_concurrent: Annotated[
        int | None, _option("max_concurrent", "Environments at once, per rollout worker")
    ] = None,
    eval_tasks: Annotated[int | None, _option("eval_tasks", "Held-out tasks")] = None,
    eval_before: Annotated[
        bool, typer.Option("--eval-before", help="Evaluate the initial policy too.")
    ] = False,
    loss_fn: Annotated[LossFn, typer.Option(help="Policy loss.")] = "importance_sampling",
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Roll out one batch, report its spread, and end.")
    ] = False,
    require_update: Annotated[
        bool, typer.Option("--require-update", help="A step without spread is an error.")
    ] = False,
    debug_samples: Annotated[
        int, typer.Option(metavar="N", help="Answers to print after --calibrate.")
    ] = 0,
    min_a: Annotated[int | None, _option("min_a", "Smallest first operand")] = None,
    max_a: Annotated[int | None, _option("max_a", "Largest first operand")] = None,
    min_b: Annotated[int | None, _option("min_b", "Smallest second operand")] = None,
    max_b: Annotated[int | None, _option("max_b", "Largest second operand")] = None,
) -> None:
    """Train a LoRA adapter on the rewards of HUD tasks; by default bundled arithmetic.

    A durable run like any other: `everburn status`, `stop` and `resume` work on it.
    """
    options = HudOptions.of(dict(locals()))
    here = Path.cwd()
    options.check(here)
    _check_tasks(options, here)
    file = options.run_file(here)
    if options.calibrate:
        _calibrate(options, here)
        return
    from everburn.records.ids import RunRef
    from workers.cli.preflight import check_local, make_base_model
    from workers.cli.run import Launch, stay_with
    from workers.cli.run_file import new_run_id
    from workers.connection import Server
    from workers.hud.files import FilesBeside, RecipeFiles
    from workers.signals import sigterm_interrupts
    from workers.stack.attachment import Stack
    from workers.stack.ports import PortWishes

    check_local(file.config, here)
    run_id = new_run_id(file.name, file.config.store, datetime.now())
    files = RecipeFiles(options, RunRef(store=file.config.store, id=run_id), here / output_dir)
    with _writing(output_dir):
        files.begin()
    beside = FilesBeside(files, output_dir)
    with sigterm_interrupts():
        make_base_model(file.config, here)
        with Stack.attach(here, PortWishes(), say) as stack:

            def news() -> list[str]:
                return stack.news() + beside.news()

            server = Server.of_stack(stack.state)
            order = Launch(file, run_id, server, news, epilogue=beside.epilogue)
            code = stay_with(order, stack)
    raise typer.Exit(code)


@app.command()
def files(
    output_dir: Annotated[Path, typer.Argument(metavar="[FOLDER]")] = Path(
        "runs/fireworks-serverless"
    ),
) -> None:
    """Bring the files of a `hud train` up to date with its run, after it was left or resumed."""
    from workers.hud.files import RecipeFiles

    with _writing(output_dir):
        for line in RecipeFiles.open(output_dir).epilogue(None, None):
            say(line)


@contextmanager
def _writing(output_dir: Path | str) -> Iterator[None]:
    from everburn.records.store import StoreError

    try:
        yield
    except (OSError, StoreError) as error:
        raise UserError(f"the files in {output_dir} can't be written: {error}") from None


def _check_tasks(options: HudOptions, folder: Path) -> None:
    """Whether the task source has what is asked of it; the workers read it again.

    Raises:
        BadInputError: it hasn't. UserError: the extra isn't installed.
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
