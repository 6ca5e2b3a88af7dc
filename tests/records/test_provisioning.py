"""Provisioning of dedicated training: valid configurations, and the ids."""

from pathlib import Path
from typing import Any

import pytest

from everburn.config import ConfigError, parse_config
from everburn.records.ids import RunRef
from everburn.records.provisioning import (
    find_provisioning,
    planned_provisioning,
    provisioned_name,
    put_provisioning,
)
from everburn.records.store import ArtifactStore

LOCAL = {
    "rollout": "task:make",
    "dataset": "rows.jsonl",
    "base_model": "tiny",
    "backend": "emulator-dedicated",
}
SHAPE = "accounts/fireworks/trainingShapes/some"
FIREWORKS = LOCAL | {"backend": "dedicated", "tokenizer_model": "some/tokenizer"}


def problems(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value)


def test_a_dedicated_configuration_determines_what_is_provisioned() -> None:
    config = parse_config(
        FIREWORKS
        | {
            "trainer": {"training_shape": SHAPE, "region": "EU_1"},
            "deployment": {"replicas": 3, "transition_type": "sync", "cleanup": "keep"},
        }
    )
    assert config.dedicated
    assert not config.local
    assert config.trainer_provisioning.region == "EU_1"
    assert config.trainer_provisioning.pending_timeout == 48 * 3600
    assert config.deployment_provisioning.replicas == 3
    assert parse_config(config.model_dump(mode="json")) == config


def test_the_emulator_needs_no_provisioning_fields() -> None:
    config = parse_config(LOCAL)
    assert config.local
    assert (config.trainer, config.deployment) == (None, None)
    assert config.deployment_provisioning.cleanup == "delete"


@pytest.mark.parametrize("name", ["trainer", "deployment"])
def test_other_backends_have_neither_trainer_nor_deployment_fields(name: str) -> None:
    text = problems(LOCAL | {"backend": "emulator", name: {}})
    assert f"{name}: belongs to backend 'dedicated'" in text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"trainer": {"shape": SHAPE}}, "trainer.shape: "),
        ({"trainer": {"training_shape": "some"}}, "isn't a training shape: write accounts/"),
        ({"trainer": {"job_id": "accounts/a/rlorTrainerJobs/b"}}, "not a full resource name"),
        ({"trainer": {"inactivity_timeout": 4 * 3600}}, "trainer.inactivity_timeout"),
        ({"trainer": {"replicas": "2"}}, "trainer.replicas"),
        ({"deployment": {"replicas": 0}}, "deployment.replicas"),
        ({"deployment": {"hotload_timeout": 3601}}, "deployment.hotload_timeout"),
        ({"deployment": {"transition_type": "SOON"}}, "deployment.transition_type"),
        ({"deployment": {"cleanup": "scale-to-zero"}}, "deployment.cleanup"),
        ({"deployment": {"shape": SHAPE}}, "isn't a deployment shape"),
        (
            {"trainer": {"job_id": "j"}, "deployment": {"weight_sync_scope": "per_deployment"}},
            "can't be combined with the job_id",
        ),
    ],
)
def test_an_invalid_provisioning_field_is_refused(values: dict[str, Any], text: str) -> None:
    assert text in problems(LOCAL | values)


def test_fireworks_requires_the_hardware_of_the_deployment() -> None:
    assert "name a training_shape, or for the deployment a shape" in problems(FIREWORKS)
    parse_config(FIREWORKS | {"deployment": {"deployment_id": "mine"}})
    parse_config(FIREWORKS | {"trainer": {"training_shape": SHAPE}})
    without = {key: value for key, value in FIREWORKS.items() if key != "tokenizer_model"}
    assert "backend 'dedicated' needs it" in problems(
        without | {"trainer": {"training_shape": SHAPE}}
    )


def test_the_deployment_may_name_the_tokenizer_as_the_recipe_does() -> None:
    dedicated = LOCAL | {"backend": "dedicated", "trainer": {"training_shape": SHAPE}}
    named = {"deployment": {"tokenizer_model": "some/tokenizer"}}
    config = parse_config(dedicated | named)
    assert config.tokenizer_model == "some/tokenizer"
    assert parse_config(dedicated | named | {"tokenizer_model": "some/tokenizer"}) == config
    assert parse_config(config.model_dump(mode="json")) == config
    text = problems(dedicated | named | {"tokenizer_model": "another/one"})
    assert "deployment: its tokenizer_model 'some/tokenizer' isn't the run's, which is" in text
    text = problems(dedicated | {"deployment": {"tokenizer_model": 3}})
    assert "deployment.tokenizer_model" in text and "\n  tokenizer_model: backend" in text


def test_rules_between_fields_are_checked_despite_an_invalid_field() -> None:
    attached = {"trainer": {"job_id": "j"}, "deployment": {"weight_sync_scope": "per_deployment"}}
    text = problems(FIREWORKS | attached | {"epochs": "3"})
    assert "3 problems" in text
    assert all(
        part in text for part in ("epochs: ", "can't be combined with the job_id", "hardware")
    )


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"lora_rank": 4}, "output_merged: requires output_model_id"),
        ({"output_model_id": "m"}, "output_merged: all parameters are trained"),
        (
            {"output_model_id": "m", "lora_rank": 4, "backend": "emulator"},
            "output_merged: needs a trainer job of the run's own",
        ),
    ],
)
def test_only_an_adapter_that_becomes_a_model_can_be_merged(
    values: dict[str, Any], text: str
) -> None:
    assert text in problems(LOCAL | {"output_merged": True} | values)


def test_ids_name_their_run_and_no_other() -> None:
    run = RunRef(store="runs", id="Arithmetic_2026.11-a-very-long-name-that-goes-on-and-on")
    first, second = provisioned_name(run, "chain-1"), provisioned_name(run, "chain-2")
    assert first != second
    assert first == provisioned_name(run, "chain-1")
    assert first.startswith("eb-arithmetic-2026-11-a-very-long-name")
    assert len(f"{first}-99") <= 63
    assert provisioned_name(RunRef(store="runs", id="___"), "chain").startswith("eb-")


def test_a_record_survives_and_counts_the_jobs_of_a_run(tmp_path: Path) -> None:
    run = RunRef(store=str(tmp_path), id="run")
    store = ArtifactStore.of(run)
    assert find_provisioning(store) is None
    config = parse_config(LOCAL | {"deployment": {"deployment_id": "mine"}})
    planned = planned_provisioning(run, "chain", config)
    put_provisioning(store, planned)
    again = put_provisioning(store, planned.next_attempt())
    assert find_provisioning(store) == again
    assert again.job_id == f"{planned.job_id}-2"
    assert (again.own_job, again.own_deployment) == (True, False)
    assert again.deployment_id == "mine"
