"""The emulator's base models: their names and their cache on this machine.

A base model is made from a recipe (recipe.py) on first use and kept in the user's cache folder
(EVERBURN_CACHE overrides it), under a name that changes with the recipe. Importing this module
imports neither torch nor transformers.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from everburn.config import Entrypoint
from everburn.emulator.models.recipe import Progress, Recipe, Shape, make
from everburn.emulator.models.vocabulary import END, PAD, Vocabulary
from everburn.usercode.entrypoints import EntrypointError, call

TINY = "accounts/everburn/models/tiny"
NAMES = (TINY,)
"""The built-in base models. Others are named by their recipe: `package.module:function`."""

CACHE_ENV = "EVERBURN_CACHE"

TINY_ALPHABET = (
    PAD,
    END,
    *"0123456789+=()",
    *"-*/,.:;?! ",
    *"abcdefghijklmnopqrstuvwxyz",
    *"ABCDEFGHIJKL",
)
TINY_SHAPE = Shape(layers=2, width=32, inner=64, heads=2, kv_heads=1, positions=256)


class UnknownBaseModel(ValueError):
    def __init__(self, name: str, problem: str | None = None) -> None:
        known = f"the emulator has {', '.join(NAMES)}, and recipes named package.module:function"
        super().__init__(f"unknown base model {name!r}: {problem or known}")


def is_known(name: str) -> bool:
    """True for a built-in base model, and for any name of the form of a recipe."""
    return name in NAMES or _entrypoint(name) is not None


def recipe_of(name: str) -> Recipe:
    """The recipe of a base model; imports its module. Raises UnknownBaseModel."""
    if name == TINY:
        return Recipe(name="tiny", vocabulary=TINY_ALPHABET, shape=TINY_SHAPE, seed=7)
    entrypoint = _entrypoint(name)
    if entrypoint is None:
        raise UnknownBaseModel(name)
    try:
        recipe = call(entrypoint)
    except EntrypointError as error:
        raise UnknownBaseModel(name, str(error)) from error
    if not isinstance(recipe, Recipe):
        raise UnknownBaseModel(name, f"it returned a {type(recipe).__name__}, not a Recipe")
    return recipe


def ensure(name: str) -> Path:
    """The folder of a base model (config.json, model.safetensors, tokenizer). Makes it if missing,
    or waits for another process that does. Raises UnknownBaseModel."""
    recipe = recipe_of(name)

    def build(folder: Path) -> None:
        label = f"making the base model {recipe.name} (once)"
        with _reporting(label) as progress, _one_torch_thread():
            make(recipe, folder, progress)

    return _cached(recipe.name, recipe.identity, build)


def tokenizer_path(name: str) -> Path:
    """The folder of a base model's tokenizer; doesn't make the model. Raises UnknownBaseModel."""
    recipe = recipe_of(name)
    write = Vocabulary(recipe.vocabulary).write_tokenizer
    return _cached(f"{recipe.name}-tokenizer", recipe.identity, write)


def _entrypoint(name: str) -> Entrypoint | None:
    try:
        return Entrypoint(name=name)
    except ValidationError:
        return None


def _cached(name: str, identity: str, build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, once per identity.

    A failed build leaves nothing. The next build removes the draft of a killed one.
    """
    root = cache_folder()
    target = root / f"{name}-{identity}"
    if target.exists():
        return target
    root.mkdir(parents=True, exist_ok=True)
    with _lock(root / f".{target.name}.lock", name):
        if not target.exists():
            draft = root / f".{target.name}.draft"
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            try:
                build(draft)
                draft.rename(target)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    return target


def cache_folder() -> Path:
    from platformdirs import user_cache_path

    override = os.environ.get(CACHE_ENV)
    return Path(override) if override else user_cache_path("everburn")


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """A lock between processes, which the kernel releases when its holder ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {name} ...", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Models of this size are slower on two threads than on one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _reporting(label: str) -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, else a line per tenth."""
    if not sys.stderr.isatty():

        def print_progress(done: int, total: int) -> None:
            if done % max(1, total // 10) == 0:
                print(f"{label}: {100 * done // total} %", file=sys.stderr, flush=True)

        yield print_progress
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
