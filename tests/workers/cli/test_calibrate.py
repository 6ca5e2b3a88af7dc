"""`everburn calibrate` as a user sees it, on the emulator's tiny base model."""

import json
import re
from typing import Any

from everburn.emulator.models.base_model import TINY
from support.command_line import Everburn

TASK = """
from everburn import RecoverableRolloutError, RolloutRun, RolloutSample

def rows(outcomes):
    return [{"outcomes": each} for each in outcomes]

def make_rollout_fn(setup):
    async def rollout_fn(sample_prompt, rollout_idx):
        prompt = setup.tokenizer.encode("ab")
        sample = await setup.sampler.sample(prompt, max_tokens=3)
        outcome = sample_prompt["outcomes"][rollout_idx]
        if outcome == "fail":
            raise RecoverableRolloutError("the judge is out")
        if outcome == "drop":
            return None
        segment = RolloutSample.of_sample(prompt, sample, float(outcome))
        # The answer names its row and completion.
        return RolloutRun([segment], answer=f" {sample_prompt['outcomes']}[{rollout_idx}]\\n")

    return rollout_fn
"""


def calibrated(everburn: Everburn, outcomes: list[list[Any]], *more: str, **fields: Any) -> str:
    """The output of the command for completions with these rewards."""
    (everburn.folder / "task.py").write_text(TASK)
    config = {
        "rollout": "task:make_rollout_fn",
        "dataset": {"name": "task:rows", "kwargs": {"outcomes": outcomes}},
        "shuffle": False,
        "base_model": TINY,
        "lora_rank": 4,
        "backend": "emulator",
        "completions_per_prompt": len(outcomes[0]),
        "prompt_groups_per_step": 3,
    }
    (everburn.folder / "run.json").write_text(json.dumps(config | fields))
    done = everburn("calibrate", "run.json", *more)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (everburn.folder / "runs").exists()
    assert everburn.processes() == []
    return done.stdout


def test_the_report_has_all_figures_advice_and_samples(everburn: Everburn) -> None:
    outcomes = [[1, 0, 1, 0], [1, 1, 1, 1], [0, "drop", "fail", 0], [9, 9, 9, 9]]
    text = calibrated(everburn, outcomes, "--samples", "2")
    figures = dict(re.findall(r"^  (\S.*?)  +(\S.*)$", text, re.M))
    assert text.startswith("3 rows x 4 completions from the initial policy\n")
    assert figures["completed"] == (
        "10/12 (1 failed, the first: RecoverableRolloutError: the judge is out; 1 dropped)"
    )
    assert figures["reward"] == "0.600 on average"
    # The square root of a third in one row, and zero in two.
    assert figures["within groups"] == "0.192 standard deviation on average"
    assert figures["flat groups"] == "2/3"
    at_limit, of = figures["at the token limit"].split("/")
    mean, most = re.findall(r"[\d.]+", figures["output tokens"])
    assert (int(of), int(most)) == (10, 3) and 1 <= float(mean) <= 3
    assert 0 <= int(at_limit) <= 10
    assert "what to change:\n" in text
    assert "  - 2 of 3 rows train nothing: more completions per row" in text
    samples = re.findall(r"^--- reward=(\d\.\d\d) output_tokens=([1-3])\n(.*)$", text, re.M)
    assert [(reward, answer) for reward, _, answer in samples] == [
        ("1.00", "[1, 0, 1, 0][0]"),
        ("0.00", "[1, 0, 1, 0][1]"),
    ]


def test_dedicated_training_on_the_emulator_is_calibrated_without_a_job(
    everburn: Everburn,
) -> None:
    text = calibrated(
        everburn,
        [[1, "fail"], ["drop", 0]],
        "--samples",
        "0",
        backend="emulator-dedicated",
        trainer={"replicas": 1},
        deployment={"transition_type": "sync"},
    )
    assert "completed           2/4" in text
    assert "no row has two completions to compare: 2 of 4 failed or were dropped" in text
    assert "got the same reward" not in text
    assert "---" not in text
