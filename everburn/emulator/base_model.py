"""The emulator's base models: which there are, and where on this machine they lie.

Made on first use, kept in the user's cache folder (EVERBURN_CACHE overrides it) under a name that
changes with the recipe. Owns names, cache and lock. Doesn't own how the arithmetic model is trained
(recipe.py). Importing this module imports neither torch nor transformers.
"""

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from everburn.emulator import sums
from everburn.emulator.recipe import Progress, Recipe, make

ARITHMETIC = "accounts/everburn/models/arithmetic"
TINY = "accounts/everburn/models/tiny"
NAMES = (ARITHMETIC, TINY)

CACHE_ENV = "EVERBURN_CACHE"

TINY_SEED = 7
TINY_ALPHABET = (
    *sums.ALPHABET,
    *"-*/,.:;?! ",
    *"abcdefghijklmnopqrstuvwxyz",
    *"ABCDEFGHIJKL",
)
"""64 characters."""
TINY_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


class UnknownBaseModel(ValueError):
    """A name that the emulator has no base model for; lists those it has."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown base model {name!r}; the emulator has {', '.join(NAMES)}")


def ensure(name: str) -> Path:
    """The folder of a base model (config.json, model.safetensors, tokenizer); made if need be.

    Says on stderr how far it is, or what it waits for. Two processes may ask at once: one makes it.

    Raises:
        UnknownBaseModel
    """
    if name == ARITHMETIC:
        recipe = Recipe()
        identity = recipe.parameters | {
            "alphabet": sums.ALPHABET,
            "held_out": sums.held_out_pairs(),
        }
        return _cached("arithmetic", identity, lambda folder: _arithmetic(recipe, folder))
    if name == TINY:
        identity = {"shape": TINY_SHAPE, "seed": TINY_SEED, "alphabet": TINY_ALPHABET}
        return _cached("tiny", identity, _tiny)
    raise UnknownBaseModel(name)


def tokenizer_path(name: str) -> Path:
    """The folder of a base model's tokenizer, also while the model isn't made yet.

    Raises:
        UnknownBaseModel
    """
    if name not in NAMES:
        raise UnknownBaseModel(name)
    alphabet = sums.ALPHABET if name == ARITHMETIC else TINY_ALPHABET
    short = name.rsplit("/", 1)[-1]
    return _cached(
        f"{short}-tokenizer",
        {"alphabet": alphabet},
        lambda folder: _write_tokenizer(alphabet, folder),
    )


def _arithmetic(recipe: Recipe, folder: Path) -> None:
    with _reporting("making the base model (once)") as progress, _one_torch_thread():
        make(recipe, folder, progress)
    _write_tokenizer(sums.ALPHABET, folder)


def _tiny(folder: Path) -> None:
    """Random weights from a fixed seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(TINY_SEED)
        config = Qwen3Config(
            vocab_size=len(TINY_ALPHABET),
            tie_word_embeddings=False,
            pad_token_id=TINY_ALPHABET.index(sums.PAD),
            eos_token_id=TINY_ALPHABET.index(sums.END),
            bos_token_id=None,
            **TINY_SHAPE,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(TINY_ALPHABET, folder)


def _write_tokenizer(alphabet: Sequence[str], folder: Path) -> None:
    """A token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=sums.PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=sums.PAD, eos_token=sums.END
    ).save_pretrained(folder)


def _cached(name: str, identity: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, once per identity.

    A build that fails leaves nothing; what a killed one left goes with the next build.
    """
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    root = cache_folder()
    target = root / f"{name}-{digest}"
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
    """Where base models are kept."""
    from platformdirs import user_cache_path

    override = os.environ.get(CACHE_ENV)
    return Path(override) if override else user_cache_path("everburn")


@contextmanager
def _lock(path: Path, name: str) -> Iterator[None]:
    """Held by one process; the kernel drops it when that process ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {name} ...", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """A model of this size is slower on two threads than on one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _reporting(what: str) -> Iterator[Progress]:
    """A progress bar on a terminal; elsewhere a line now and then. Both on stderr."""
    if not sys.stderr.isatty():

        def say(done: int, total: int) -> None:
            if done % max(1, total // 10) == 0:
                print(f"{what}: {100 * done // total} %", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
