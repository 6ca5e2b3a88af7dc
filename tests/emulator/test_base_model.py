"""Base models are made once, by concurrent processes and after a killed one. Uses the tiny model;
the arithmetic model is made by `make run`, here only its data is tested."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from everburn.emulator.models import base_model
from everburn.emulator.models.base_model import TINY, UnknownBaseModel
from everburn.emulator.models.vocabulary import Vocabulary
from examples.arithmetic import sums
from support import recipes

BUDGET = 10
PATIENCE = 120.0
"""Seconds for a process that imports torch, while others do so, too."""

RECIPE = "examples.arithmetic.base_model:recipe"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(base_model.CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_held_out_and_training_sums_are_disjoint_in_either_order() -> None:
    held_out, training = set(sums.held_out_pairs()), set(sums.training_pairs())

    assert len(held_out) == sums.HELD_OUT == 512
    assert len(held_out | training) == 8100
    assert not held_out & training
    assert {(b, a) for a, b in held_out} == held_out
    assert sums.held_out_pairs.__wrapped__() == sums.held_out_pairs()


def test_only_sums_with_a_carry_exceed_the_budget_with_their_working() -> None:
    for pair in [*sums.training_pairs()[::7], *sums.held_out_pairs()]:
        if sums.carries(pair):
            assert len(sums.working(pair) + sums.answer(pair)) > BUDGET, pair
        assert len(sums.answer(pair)) <= BUDGET


@pytest.mark.parametrize("name", base_model.NAMES)
def test_a_tokenizer_encodes_and_decodes_characters(cache: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(base_model.tokenizer_path(name)))

    assert tokenizer.decode(tokenizer.encode("47+85=132\n")) == "47+85=132\n"
    assert len(tokenizer.encode("47+85=132\n")) == 10
    assert tokenizer.eos_token == sums.END


def test_a_model_is_made_once(cache: Path) -> None:
    folder = base_model.ensure(TINY)
    made = (folder / "model.safetensors").stat().st_mtime_ns

    assert base_model.ensure(TINY) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert {"config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


def test_two_concurrent_processes_make_one_model(cache: Path) -> None:
    with asking() as first:
        assert_reads(first.stdout, "making")
        with asking() as second:
            assert_reads(second.stderr, "waiting for another process that makes tiny")
            assert_made(first, proceed=True)
            assert_made(second, proceed=False)

    assert [folder.name.partition("-")[0] for folder in folders(cache)] == ["tiny"]


def test_a_waiting_process_takes_over_from_a_killed_one(cache: Path) -> None:
    with asking() as first:
        assert_reads(first.stdout, "making")
        with asking() as second:
            assert_reads(second.stderr, "waiting for another process that makes tiny")
            [draft] = folders(cache)
            (draft / "half-written").touch()
            first.kill()
            assert_reads(second.stdout, "making")
            assert_made(second, proceed=True)

    [made] = folders(cache)
    assert made == base_model.ensure(TINY)
    assert not (made / "half-written").exists()


def test_a_failed_build_of_a_model_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(vocabulary: Vocabulary, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, pytest.raises(OSError, match="No space"):
        broken.setattr(Vocabulary, "write_tokenizer", no_space)
        base_model.ensure(TINY)
    assert folders(cache) == []
    assert base_model.ensure(TINY).exists()


def test_the_error_for_an_unknown_name_lists_the_known_ones(cache: Path) -> None:
    with pytest.raises(UnknownBaseModel, match=rf"unknown base model 'none'.*{TINY}"):
        base_model.ensure("none")
    with pytest.raises(UnknownBaseModel):
        base_model.tokenizer_path("none")


def test_a_base_model_is_made_from_the_recipe_that_its_name_refers_to(cache: Path) -> None:
    folder = base_model.ensure("support.recipes:greeting")

    assert folder.name == f"greeting-{recipes.greeting().identity}"
    assert base_model.ensure("support.recipes:greeting") == folder
    tokenizer = AutoTokenizer.from_pretrained(
        str(base_model.tokenizer_path("support.recipes:greeting"))
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = torch.tensor([tokenizer.encode("hi")])
    output = model.generate(prompt, max_new_tokens=2, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output) == "hello\n", "the model doesn't repeat its demonstrations"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("support.recipes:absent", "has no 'absent'"),
        ("absent_module:recipe", "can't import 'absent_module'"),
        ("support.recipes:no_recipe", "it returned a str, not a Recipe"),
    ],
)
def test_a_name_that_does_not_refer_to_a_recipe_is_refused(
    cache: Path, name: str, problem: str
) -> None:
    assert base_model.is_known(name)
    with pytest.raises(UnknownBaseModel, match=problem):
        base_model.ensure(name)


def test_a_rollout_worker_needs_no_torch_for_its_tokenizer(cache: Path) -> None:
    code = (
        "import sys; from everburn.emulator.models import base_model; "
        f"base_model.tokenizer_path({RECIPE!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


ASK_FOR_TINY = f"""
from everburn.emulator.models import base_model
from everburn.emulator.models.vocabulary import Vocabulary
write_tokenizer = Vocabulary.write_tokenizer

def wait_for_input(vocabulary, folder):
    print("making", flush=True)
    input()
    write_tokenizer(vocabulary, folder)

Vocabulary.write_tokenizer = wait_for_input
print("made", base_model.ensure({TINY!r}), flush=True)
"""
"""Ensures the tiny model. If it makes the model itself, prints "making" and waits for a line."""


@contextmanager
def asking() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", ASK_FOR_TINY], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        patience = threading.Timer(PATIENCE, process.kill)  # ends a blocked read
        patience.start()
        try:
            yield process
        finally:
            patience.cancel()
            process.kill()


def assert_reads(stream: IO[str] | None, text: str) -> None:
    """Read up to a line with this text."""
    assert stream is not None
    assert any(text in line for line in stream), f"ended without {text!r}"


def assert_made(process: subprocess.Popen[str], proceed: bool) -> None:
    """The process prints the model's folder. With proceed=False it must not make the model."""
    out, err = process.communicate("\n" if proceed else "", timeout=PATIENCE)
    assert out.startswith("made ") and process.returncode == 0, err


def folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]
