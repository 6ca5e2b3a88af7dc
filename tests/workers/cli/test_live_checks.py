"""`everburn doctor --live` against the emulator."""

from typing import Any

import pytest

from everburn.config import RunConfig, parse_config
from everburn.emulator.models import base_model
from support.emulator import RunningEmulator
from workers.cli.live_checks import live_answers


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "fw_some_key_of_a_test")


def a_config(url: str, **changes: Any) -> RunConfig:
    values = {
        "rollout": "task:make",
        "dataset": "rows.jsonl",
        "base_model": base_model.TINY,
        "tokenizer_model": str(base_model.ensure(base_model.TINY)),
        "lora_rank": 4,
        "backend": "serverless",
        "base_url": url,
        "api_key_env": "SOME_KEY",
        "output_model_id": "not-yet-there",
    }
    return parse_config(values | changes)


def answers(config: RunConfig) -> dict[str, tuple[str, str]]:
    return {subject: (verdict, text) for verdict, subject, text in live_answers(config)}


def test_a_run_with_all_requirements(emulator: RunningEmulator) -> None:
    before = emulator.admin("GET", "state")["sessions"].keys()
    found = answers(a_config(emulator.base_url))
    assert {verdict for verdict, _ in found.values()} == {"ok"}
    assert found.keys() == {"account", "base model", "output_model_id", "tokenizer"}
    assert found["account"][1] == "everburn"
    assert emulator.admin("GET", "state")["sessions"].keys() <= before  # nothing is opened


def test_a_missing_model(emulator: RunningEmulator) -> None:
    found = answers(a_config(emulator.base_url, base_model="accounts/fireworks/models/none"))
    assert found["base model"][0] == "missing"
    assert "no model accounts/fireworks/models/none" in found["base model"][1]


@pytest.mark.parametrize(("status", "text"), [(401, "is refused"), (403, "lacks the permission")])
def test_a_rejected_key_is_named(emulator: RunningEmulator, status: int, text: str) -> None:
    emulator.plan_fault("accounts", "status", status=status, message="fw_some_key_of_a_test")
    (verdict, answer), *others = answers(a_config(emulator.base_url)).values()
    assert (verdict, others) == ("missing", [])
    assert f"the API key in SOME_KEY {text}" in answer
    assert "fw_some_key_of_a_test" not in answer


def test_no_key_and_no_server(
    emulator: RunningEmulator, monkeypatch: pytest.MonkeyPatch, dead_url: str
) -> None:
    ((verdict, text),) = answers(a_config(dead_url)).values()
    assert verdict == "missing" and "nothing answers" in text
    monkeypatch.delenv("SOME_KEY")
    ((verdict, text),) = answers(a_config(emulator.base_url)).values()
    assert verdict == "missing" and "SOME_KEY is empty" in text


def test_a_tokenizer_that_fails_to_load(emulator: RunningEmulator, tmp_path: Any) -> None:
    found = answers(a_config(emulator.base_url, tokenizer_model=str(tmp_path)))
    assert found["tokenizer"][0] == "missing"


def test_a_training_shape_is_looked_up(emulator: RunningEmulator) -> None:
    shape = "accounts/fireworks/trainingShapes/some-shape"
    config = a_config(
        emulator.url, backend="dedicated", lora_rank=0, trainer={"training_shape": shape}
    )
    verdict, text = answers(config)["training shape"]
    assert verdict == "ok" and text.startswith(f"{shape}/versions/")
    emulator.plan_fault("versions", "status", status=404)
    verdict, text = answers(config)["training shape"]
    assert verdict == "missing" and "HTTP 404" in text
