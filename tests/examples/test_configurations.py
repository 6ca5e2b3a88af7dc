"""The examples' configurations: valid, the same task on both backends, and no model without its
format."""

import json
from pathlib import Path

import pytest

from everburn.config import parse_config

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/run*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_it_is_valid_and_meant(path: Path) -> None:
    assert parse_config(json.loads(path.read_text())).warnings() == []


@pytest.mark.parametrize("name", ["arithmetic", "deepmath", "frozen_lake", "multihop_qa"])
def test_fireworks_is_a_matter_of_configuration(name: str) -> None:
    local, remote = (
        parse_config(json.loads((EXAMPLES / name / file).read_text()))
        for file in ("run.json", "run.fireworks.json")
    )
    assert (local.backend, remote.backend) == ("emulator", "serverless")
    assert local.rollout == remote.rollout
    assert local.prepare_batch == remote.prepare_batch


@pytest.mark.parametrize("name", ["arithmetic", "deepmath"])
def test_dedicated_training_is_a_matter_of_where_and_what(name: str) -> None:
    """The task and its rows are the same; a deployment and other parameters are what differs."""
    serverless, dedicated = (
        json.loads((EXAMPLES / name / file).read_text())
        for file in ("run.fireworks.json", "run.dedicated.json")
    )
    assert (serverless["backend"], dedicated["backend"]) == ("serverless", "dedicated")
    names = serverless.keys() | dedicated.keys()
    assert {each for each in names if serverless.get(each) != dedicated.get(each)} == {
        "backend",
        "base_model",
        "tokenizer_model",
        "lora_rank",
        "learning_rate",
        "trainer",
        "deployment",
    }


@pytest.mark.parametrize("name", ["frozen_lake", "multihop_qa"])
def test_a_renderer_of_the_configurations_name_exists(name: str) -> None:
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    values = json.loads((EXAMPLES / name / "run.fireworks.json").read_text())
    typed = TypeAdapter(RendererConfig).validate_python(values["extras"]["renderer"])
    assert typed.name == "qwen3.8"
