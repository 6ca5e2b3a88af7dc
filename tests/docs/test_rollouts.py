"""The code of docs/rollouts.md, executed on the emulator."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everburn.config import parse_config
from everburn.emulator.models.base_model import TINY
from everburn.learning.rollout_file import CompletionRecord, read_rollout
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import ROWS_KEY, rollout_key
from everburn.records.ledger import read_ledger
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.sandboxes import sandbox_keys
from everburn.rollouts.task import prepare_task
from support.agents import a_run
from support.command_line import ROOT, Everburn, free_ports
from support.emulator import RunningEmulator
from support.policies import ScriptedPolicy, qwen3_tokenizer, setup_of

PAGE = (ROOT / "docs" / "rollouts.md").read_text()
TASKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, flags=re.DOTALL))
HUD = dict(re.findall(r"```python\n# (letters/\w+\.py)\n(.*?)```", PAGE, flags=re.DOTALL))
"""A HUD environment and its tasks, which know nothing of Everburn."""
MODELS = {name: TASKS.pop(name) for name in list(TASKS) if name.endswith("_model")}
QWEN3 = {"renderer": {"name": "qwen3", "enable_thinking": False}}


@pytest.fixture(scope="module", autouse=True)
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's files, where they can be imported."""
    folder = tmp_path_factory.mktemp("tasks")
    write_files(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))
    for name in TASKS | MODELS:
        sys.modules.pop(name, None)


def write_files(folder: Path) -> None:
    for name, code in (TASKS | MODELS).items():
        (folder / f"{name}.py").write_text(code)


def test_every_block_of_code_is_a_task_or_a_model() -> None:
    assert len(TASKS) >= 6 and HUD.keys() == {"letters/env.py", "letters/tasks.py"}
    assert MODELS.keys() == {"guess_model"}
    blocks = len(re.findall(r"```python\n", PAGE))
    assert len(TASKS) + len(HUD) + len(MODELS) == blocks


def test_the_configuration_is_one() -> None:
    config = parse_config(configurations()[0])
    assert config.rollout.name == "sums_task:make_rollout_fn"


def configurations() -> list[dict[str, Any]]:
    """Of the page's first task, and of its HUD environment."""
    texts = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(texts) == 2
    return [json.loads(text) for text in texts]


async def test_the_hud_environment_is_rolled_out(
    emulator: RunningEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page's configuration says, but on a model that is made in no time."""
    pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")
    for name, code in HUD.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    config = configurations()[1] | {"base_model": TINY, "lora_rank": 4}
    assert parse_config(config).warnings() == []
    async with a_run(tmp_path / "runs", emulator.base_url, rows=False, **config) as run:
        prepared = prepare_task(run)
        assert (prepared.rows, prepared.evaluation_rows) == (24, 12)
        runner, key = RolloutRunner(run), GroupKey(cursor=0)
        await runner.complete(key, 0, 0)
        record, rollout = read_rollout(runner.store, rollout_key(key, 0))
        assert re.fullmatch(r"[1-6]{2}=", record.prompt)
        assert record.info["got"] == len(set(rollout.answer or ""))
        assert [s.reward for s in rollout.segments] == [min(1.0, record.info["got"] / 5)]
        report = await runner.evaluate(0, 0)
        assert report["info"]["got"] == len(set(report["answer"]))


@pytest.mark.parametrize("name", TASKS)
async def test_the_task_runs(emulator: RunningEmulator, tmp_path: Path, name: str) -> None:
    ((record, rollout),) = await completions(emulator, tmp_path, name, 1)
    assert all(any(segment.loss_mask) for segment in rollout.segments)
    assert record.output_tokens == sum(sum(s.loss_mask) for s in rollout.segments)
    if name == "harness_task":
        assert record.info["turns"] == 2 and record.info["boundaries"]["appends"] == 1
    if name == "own_loop_task":
        assert record.info["appends"] == 2


async def test_the_small_model_knows_its_format(emulator: RunningEmulator, tmp_path: Path) -> None:
    """What it is surest of are digits. It also samples, and of a hundred guesses one isn't."""
    model = {"base_model": "guess_model:recipe"}
    ((surest, _),) = await completions(
        emulator, tmp_path / "surest", "guess_task", 1, temperature=0.0, **model
    )
    assert surest.info["guesses"] and all(guess.isdigit() for guess in surest.info["guesses"])
    games = await completions(emulator, tmp_path / "sampled", "guess_task", 50, **model)
    guesses = [guess for record, _ in games for guess in record.info["guesses"]]
    assert len(guesses) >= 50
    assert sum(guess.isdigit() for guess in guesses) >= 0.95 * len(guesses)


@pytest.mark.chaos  # a minute: 32 steps
def test_the_pages_files_run_in_a_folder_of_their_own(tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(configurations()[0]))
    everburn = Everburn(tmp_path)
    try:
        run = everburn.start("run", "run.json", *free_ports())
        assert run.wait(timeout=1800) == 0, everburn.told()
        ledger = read_ledger(ArtifactStore.of(latest(tmp_path)))
        rewards = [entry.metrics["rollout/raw_reward"] for entry in ledger]
        assert len(rewards) == 32 and sum(rewards[-8:]) > sum(rewards[:8])

        game = {
            "rollout": "guess_task:make_rollout_fn",
            "dataset": {"name": "guess_task:rows"},
            "base_model": "guess_model:recipe",
        }
        (tmp_path / "run.json").write_text(json.dumps(configurations()[0] | game))
        run = everburn.start("run", "run.json", *free_ports())
        assert run.wait(timeout=600) == 0, everburn.told()
        assert len(read_ledger(ArtifactStore.of(latest(tmp_path)))) == 2
    finally:
        everburn.close()


def latest(folder: Path) -> RunRef:
    """The run that was started last there."""
    return RunRef(store=str(folder / "runs"), id=(folder / "runs/latest").resolve().name)


async def completions(
    emulator: RunningEmulator, folder: Path, name: str, count: int, **fields: Any
) -> list[tuple[CompletionRecord, RolloutRun]]:
    """Completions of a task's first row, as a rollout worker makes them."""
    kwargs: dict[str, Any] = {"kwargs": {"count": 2}} if name == "sums_task" else {}
    fields = {
        "rollout": f"{name}:make_rollout_fn",
        "dataset": {"name": f"{name}:rows"} | kwargs,
        "base_model": TINY,
        "completions_per_prompt": max(2, count),
        "extras": {"sandboxes": str(folder / "sandboxes")},
        "shuffle": False,
    } | fields
    async with a_run(folder, emulator.base_url, rows=False, **fields) as run:
        store = ArtifactStore.of(run)
        assert prepare_task(run).rows >= 1 and store.exists(ROWS_KEY)
        key, runner = GroupKey(cursor=0), RolloutRunner(run)
        for completion in range(count):
            await runner.complete(key, completion, 0)
        if name == "sandbox_task":
            assert list((folder / "sandboxes").iterdir()) == [] == sandbox_keys(store)
        return [read_rollout(store, rollout_key(key, index)) for index in range(count)]


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A chat model's; its words are decided by the tests below."""
    tokenizer = qwen3_tokenizer(Path(tmp_path_factory.mktemp("qwen3")))
    tokenizer.chat_template = "there is one"
    return tokenizer


async def played(tokenizer: Any, name: str, row: int, answers: list[str]) -> RolloutRun:
    """A rollout of a policy that says what it is told."""
    policy = ScriptedPolicy(tokenizer, [f"{answer}<|im_end|>" for answer in answers])
    module = importlib.import_module(name)
    rollout_fn = module.make_rollout_fn(setup_of(policy, tokenizer, extras=QWEN3))
    run = await rollout_fn(module.rows()[row])
    assert isinstance(run, RolloutRun)
    return run


def call(name: str, city: str) -> str:
    arguments = json.dumps({"name": name, "arguments": {"city": city}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


async def test_guesses_are_judged(chat_tokenizer: Any) -> None:
    run = await played(chat_tokenizer, "guess_task", 7, ["seven", "8", "7"])
    assert run.segments[0].reward == pytest.approx(1 / 3)
    assert run.info["guesses"] == ["seven", "8", "7"] and len(run.segments) == 1


async def test_the_quiz_is_played_with_tools(chat_tokenizer: Any) -> None:
    answers = [call("look_up", "Bonn"), call("look_up", "Rome"), call("submit", "bonn")]
    run = await played(chat_tokenizer, "lookup_task", 0, answers)
    assert run.segments[0].reward == 1.0 and run.info["ended"] == "done"
    assert (run.info["looked"], run.info["failed_calls"], run.info["turns"]) == (2, 1, 3)
