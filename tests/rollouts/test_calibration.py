"""Calibration: figures of a batch from the initial policy, advice, and cleanup."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from everburn import RecoverableRolloutError, RolloutFn, RolloutRun, RolloutSample, RolloutSetup
from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import rollout_key
from everburn.records.run_folder import stored_config
from everburn.records.store import ArtifactStore
from everburn.rollouts.calibration import (
    Calibration,
    CalibrationFailedError,
    Rollout,
    calibrate,
)
from everburn.rollouts.tokenizers import load_tokenizer
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import RunningEmulator
from support.records import a_record
from support.waiting import until

EVENTS: list[str] = []
"""Events of completions and their session, in order."""


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """The row states its completions' rewards; the policy is sampled nevertheless."""

    async def rollout_fn(sample_prompt: dict[str, Any], rollout_idx: int) -> RolloutRun | None:
        prompt = setup.tokenizer.encode("ab")
        sample = await setup.sampler.sample(prompt, max_tokens=4)
        outcome = sample_prompt["outcomes"][rollout_idx]
        if outcome == "drop":
            return None
        if outcome == "fail":
            raise RecoverableRolloutError("the judge is out")
        if outcome == "break":
            raise KeyError("a bug")
        if outcome == "break late":
            await until(lambda: EVENTS.count("waits") == 2)
            raise KeyError("a bug")
        if outcome == "wait":
            EVENTS.append("waits")
            try:
                await asyncio.Event().wait()
            finally:
                await setup.sampler.sample(prompt, max_tokens=4)
                EVENTS.append("ended")
        return RolloutRun([RolloutSample.of_sample(prompt, sample, float(outcome))])

    return rollout_fn


def rows(outcomes: list[list[Any]]) -> list[dict[str, Any]]:
    return [{"outcomes": each} for each in outcomes]


def a_config(url: str, outcomes: list[list[Any]], **fields: Any) -> RunConfig:
    return parse_config(
        {
            "rollout": f"{__name__}:make_rollout_fn",
            "dataset": {"name": f"{__name__}:rows", "kwargs": {"outcomes": outcomes}},
            "shuffle": False,
            "base_model": TINY,
            "lora_rank": 4,
            "backend": "emulator",
            "base_url": url,
            "completions_per_prompt": len(outcomes[0]),
            "prompt_groups_per_step": 3,
        }
        | fields
    )


async def test_calibration_reports_figures_of_a_batch(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    outcomes = [[1, 0, 1, 0], [1, 1, 1, 1], [0, "drop", "fail", 0], [9, 9, 9, 9]]
    config = a_config(emulator.base_url, outcomes)
    before = emulator.admin("GET", "state")["sessions"].keys()
    run = RunRef(store=str(tmp_path), id="calibration")
    found = await calibrate(run, config, ServerlessTrainer.open)

    # The fourth row isn't in the first batch.
    assert (found.asked, len(found.rollouts)) == (12, 10)
    assert found.reward_mean == pytest.approx(6 / 10)
    assert found.reward_std_within_group == pytest.approx((1 / 3) ** 0.5 / 3)
    assert found.flat_groups == 2
    assert (found.dropped, found.failures) == (1, ["RecoverableRolloutError: the judge is out"])
    assert all(1 <= tokens <= 4 for tokens in found.output_tokens)
    assert found.at_token_limit == sum(was_cut_off(run, draw) for draw in found.rollouts)
    assert {draw.record.prompt for draw in found.rollouts} == {"ab"}
    # Sessions of earlier tests may have expired meanwhile.
    assert emulator.admin("GET", "state")["sessions"].keys() <= before


def was_cut_off(run: RunRef, draw: Rollout) -> bool:
    """Whether its four tokens contain no end token."""
    record = draw.record
    key = rollout_key(GroupKey(cursor=record.cursor), record.completion)
    _, rollout = read_rollout(ArtifactStore.of(run), key)
    end = load_tokenizer(stored_config(run)).eos_token_id
    return record.output_tokens == 4 and rollout.segments[0].tokens[-1] != end


@pytest.mark.parametrize(
    ("bad", "fields", "error", "text"),
    [
        ("break", {}, KeyError, "a bug"),
        (
            "fail",
            {"on_any_rollout_failure": "fail"},
            CalibrationFailedError,
            "2/6 rollouts failed during calibrate: RecoverableRolloutError: the judge is out",
        ),
        (
            # Counted like any other.
            "break",
            {"on_any_rollout_failure": "fail"},
            CalibrationFailedError,
            "2/6 rollouts failed during calibrate: KeyError: 'a bug'",
        ),
    ],
)
async def test_a_failure_ends_the_calibration_and_its_session(
    emulator: RunningEmulator,
    tmp_path: Path,
    bad: str,
    fields: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    config = a_config(emulator.base_url, [[1, 0], [bad, bad], [1, 0]], **fields)
    before = emulator.admin("GET", "state")["sessions"].keys()
    with pytest.raises(error, match=text):
        await calibrate(RunRef(store=str(tmp_path), id="c"), config, ServerlessTrainer.open)
    # Sessions of earlier tests may have expired meanwhile.
    assert emulator.admin("GET", "state")["sessions"].keys() <= before


async def test_cancelled_completions_end_before_their_session_closes(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    """Completions may use their sampler while they clean up."""

    class Session(ServerlessTrainer):
        async def close(self) -> None:
            EVENTS.append("session closed")
            await super().close()

    EVENTS.clear()
    config = a_config(emulator.base_url, [["break late", "wait", "wait"]])
    with pytest.raises(KeyError, match="a bug"):
        await calibrate(RunRef(store=str(tmp_path), id="c"), config, Session.open)
    assert EVENTS == ["waits", "waits", "ended", "ended", "session closed"]


def a_calibration(rewards: list[list[float]], at_limit: bool = False, **fields: Any) -> Calibration:
    record = a_record(at_token_limit=at_limit, output_tokens=3)
    config = a_config("http://nowhere.invalid", [[0, 1]], **fields)
    return Calibration(config, [[Rollout(record, r) for r in row] for row in rewards], [], 0)


@pytest.mark.parametrize(
    ("calibration", "notes"),
    [
        (a_calibration([[0, 1], [1, 1]]), []),
        (a_calibration([[], []]), ["no completion succeeded"]),
        (a_calibration([[1], [0]]), ["no row has two completions to compare: 2 of 4 failed"]),
        (a_calibration([[1], [0, 0]]), ["no signal", "either too easy or too hard"]),
        (a_calibration([[1, 1], [1, 1]]), ["no signal", "every completion got 1: make .* harder"]),
        (a_calibration([[0, 0], [0, 0]]), ["no signal", "no completion got a reward: .* easier"]),
        (a_calibration([[0, 0], [1, 1]]), ["no signal", "either too easy or too hard"]),
        (a_calibration([[0, 0]], temperature=0.0), ["no signal", "temperature is 0"]),
        (a_calibration([[0, 1], [1, 1], [0, 0]]), ["2 of 3 rows train nothing"]),
        (a_calibration([[0, 1]], at_limit=True), ["2 of 2 completions were cut off"]),
    ],
)
def test_calibration_gives_advice(calibration: Calibration, notes: list[str]) -> None:
    found = calibration.advice()
    assert len(found) == len(notes)
    for note, pattern in zip(found, notes, strict=True):
        assert re.search(pattern, note)
