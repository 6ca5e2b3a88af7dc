"""The configuration: defaults, rules and the text of every complaint."""

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from everburn.config import (
    MAX_CONFIG_BYTES,
    ConfigError,
    Entrypoint,
    RunConfig,
    forked,
    parse_config,
)

SMALLEST: dict[str, Any] = {
    "rollout": "my_task:make_rollout_fn",
    "dataset": "rows.jsonl",
    "base_model": "accounts/fireworks/models/qwen3-8b",
    "tokenizer_model": "Qwen/Qwen3-8B",
    "lora_rank": 8,
}


def config(**fields: Any) -> RunConfig:
    return parse_config(SMALLEST | fields)


def problems(**fields: Any) -> list[str]:
    """The lines below the heading, one for each problem."""
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    heading, *lines = str(caught.value).splitlines()
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    assert heading == f"{count} in the configuration:"
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("field", "default"),
    [
        ("completions_per_prompt", 4),
        ("prompt_groups_per_step", 1),
        ("max_head_offpolicy_versions", 0),
        ("max_concurrency_rollout_sample", None),
        ("min_group_size", 1),
        ("max_incomplete_group_retries", 0),
        ("max_completion_tokens", 1024),
        ("temperature", 1.0),
        ("max_seq_len", None),
        ("learning_rate", 1e-5),
        ("lr_scheduler", "constant"),
        ("epochs", 1),
        ("shuffle", True),
        ("seed", 0),
        ("max_rows", None),
        ("evaluation_interval", 1),
        ("evaluation_temperature", 0.0),
        ("dcp_save_interval", 0),
        ("save_final_checkpoint", True),
        ("grad_accumulation_normalization", "num_loss_tokens"),
        ("grad_clip_norm", 0),
        ("sampler_max_concurrency", None),
        ("collect_full_batch", False),
        ("rollout_timeout", 3600.0),
        ("evaluation_timeout", 3600.0),
        ("on_fatal", "auto"),
        ("require_update", False),
        ("on_any_rollout_failure", "drop"),
        # Beyond the recipe
        ("lora_alpha", 32),
        ("loss", "grpo"),
        ("warmup_steps", 0),
        ("weight_decay", 0.0),
        ("adam_beta1", 0.9),
        ("adam_beta2", 0.95),
        ("adam_eps", 1e-12),
        ("backend", "serverless"),
        ("store", "runs"),
    ],
)
def test_defaults_are_those_of_the_async_rl_recipe(field: str, default: object):
    assert getattr(config(), field) == default


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("lr_scheduler", ["constant", "linear", "cosine"]),
        ("grad_accumulation_normalization", ["none", "num_loss_tokens", "num_sequences"]),
        ("on_fatal", ["auto", "fail", "hold"]),
        ("on_any_rollout_failure", ["drop", "fail"]),
        ("completions_per_prompt", [2, 64]),
        ("loss", ["grpo", "cispo", "dro", "dapo", "gspo", "dppo", "reinforce"]),
        ("advantages", ["group_zscore", "mean_only", "leave_one_out"]),
        ("learning_rate", [0, 1, 3e-6]),
    ],
)
def test_every_documented_value_is_accepted(field: str, values: list[object]):
    assert [getattr(config(**{field: value}), field) for value in values] == values


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("completions_per_prompt", 0, "Input should be greater than or equal to 1 (got 0)"),
        (
            "completions_per_prompt",
            1,
            "a group of one has no group_zscore advantage: take at least 2, or name an "
            "`advantages` function of your own that is defined for one reward",
        ),
        (
            "loss",
            "grppo",
            "'grppo' is no loss of the service (grpo, importance_sampling, ppo, cispo, dro, dapo, "
            'gspo, dppo, reinforce); a Python loss is written as {"name": '
            '"package.module:function"}',
        ),
        ("loss", 3, 'write the name of a loss, or {"name": "package.module:function"} (got 3)'),
        (
            "advantages",
            "zscore",
            "'zscore' is none of group_zscore, mean_only, leave_one_out; a function of your own is "
            'written as {"name": "package.module:function"}',
        ),
        (
            "loss_config",
            {"clip_high_threshold": 0.5},
            "clip_low_threshold 0.8 and clip_high_threshold 0.5 must bound the policy ratio: "
            "0 <= low <= 1 <= high, for example 0.8 and 1.28",
        ),
        ("completions_per_prompt", 513, "Input should be less than or equal to 512 (got 513)"),
        ("base_model", "", "String should have at least 1 character (got '')"),
        ("prompt_groups_per_step", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("max_head_offpolicy_versions", -1, "Input should be greater than or equal to 0 (got -1)"),
        ("min_group_size", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("max_incomplete_group_retries", -1, "Input should be greater than or equal to 0 (got -1)"),
        ("evaluation_interval", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("dcp_save_interval", -2, "Input should be greater than or equal to 0 (got -2)"),
        ("epochs", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("max_rows", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("max_completion_tokens", 0, "Input should be greater than or equal to 1 (got 0)"),
        ("temperature", -0.1, "Input should be greater than or equal to 0 (got -0.1)"),
        ("learning_rate", -1e-5, "Input should be greater than or equal to 0 (got -1e-05)"),
        ("grad_clip_norm", -1, "Input should be greater than or equal to 0 (got -1)"),
        ("rollout_timeout", 0, "Input should be greater than 0 (got 0)"),
        ("evaluation_timeout", -1.0, "Input should be greater than 0 (got -1.0)"),
        ("adam_beta1", 1, "Input should be less than 1 (got 1)"),
        ("adam_eps", 0, "Input should be greater than 0 (got 0)"),
        (
            "lr_scheduler",
            "exponential",
            "Input should be 'constant', 'linear' or 'cosine' (got 'exponential')",
        ),
        (
            "rollout",
            "my_task.make_rollout_fn",
            "'my_task.make_rollout_fn' doesn't name a callable: write "
            "'package.module:attribute', for example 'my_task:make_rollout_fn'",
        ),
        (
            "rollout",
            5,
            "write 'package.module:attribute', or an object with that as its name (got 5)",
        ),
        ("dataset", 5, 'write a path or URL, or {"name": "package.module:function"} (got 5)'),
        (
            "min_group_size",
            5,
            "5 is above completions_per_prompt, which is 4",
        ),
        (
            "max_concurrency_rollout_sample",
            3,
            "3 can't hold one whole row: completions_per_prompt is 4",
        ),
        ("max_seq_len", 1, "must leave room for a prompt and a token"),
        (
            "lora_rank",
            0,
            "backend 'serverless' trains LoRA adapters only: set a rank, for example 8",
        ),
        (
            "tokenizer_model",
            None,
            "backend 'serverless' needs it, for example 'Qwen/Qwen3.8-27B'",
        ),
    ],
)
def test_each_rule_names_the_field_and_what_to_do(field: str, value: object, text: str):
    (line,) = problems(**{field: value})
    assert line == f"{field}: {text}"


def test_two_ways_to_evaluate_exclude_each_other():
    assert problems(evaluation="my_task:evaluate", evaluation_dataset="held_out.jsonl") == [
        "evaluation: excludes evaluation_dataset: a function evaluates, or Everburn evaluates "
        "held-out rows"
    ]


def test_what_a_run_starts_from_is_one_thing():
    reference = "acme/run-" + "0123456789abcdef" * 2 + "/state-4"
    adapter = "accounts/acme/models/warm"
    assert problems(init_from_checkpoint=reference, warm_start_from_adapter=adapter) == [
        "warm_start_from_adapter: excludes init_from_checkpoint: a checkpoint brings its own "
        "weights"
    ]
    assert problems(warm_start_from_adapter=adapter, lora_rank=0, backend="emulator") == [
        "lora_rank: must be the adapter's rank, above 0, to start from an adapter"
    ]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("init_from_checkpoint", "policy-0001-e1-0123abcd", "is a sampler snapshot"),
        ("init_from_checkpoint", "tinker://x", "isn't a checkpoint"),
        ("warm_start_from_adapter", "my-adapter", "isn't an adapter"),
        ("output_model_id", "My Model", "can't be the id of a model"),
        ("output_model_id", "x" * 64, "1 to 63 characters"),
    ],
)
def test_references_have_their_forms(field: str, value: str, text: str):
    (line,) = problems(**{field: value})
    assert line.startswith(f"{field}: ") and text in line


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_from_checkpoint", "state-4"),
        ("warm_start_from_adapter", "accounts/acme/models/warm"),
    ],
)
def test_a_fork_has_the_weights_of_the_step_it_begins_from(field: str, value: str):
    origin = config()
    with pytest.raises(ConfigError, match=f"{field} can't change in a fork: .* --at-step"):
        forked(origin, origin.model_dump(mode="json") | {field: value})
    started = config(**{field: value})
    values = started.model_dump(mode="json") | {"epochs": 2}
    assert forked(started, values) == started.model_copy(update={"epochs": 2})


def test_a_new_run_has_no_checkpoints_of_its_own():
    assert config().origin_problem() is None
    problem = config(init_from_checkpoint="state-4").origin_problem()
    assert problem is not None
    assert "everburn resume RUN --set init_from_checkpoint=state-4" in problem


def test_the_smallest_values_that_are_allowed_together():
    settings = config(
        completions_per_prompt=2, min_group_size=2, max_concurrency_rollout_sample=2, max_seq_len=2
    )
    assert settings.batch_samples == 2


def test_all_problems_are_reported_at_once():
    assert problems(
        epochs=0,
        learning_rat=1e-4,
        temperature="hot",
        dataset={"nme": "my_task:rows"},
        loss_config={"clip": None},
        min_group_size=9,
        lora_rank=0,
    ) == [
        "dataset.name: Field required",
        "dataset.nme: no such field; did you mean name?",
        "epochs: Input should be greater than or equal to 1 (got 0)",
        "temperature: Input should be a valid number (got 'hot')",
        "loss_config.clip: Input should be a valid number; or Input should be a valid string; "
        "or Input should be a valid boolean",
        "learning_rat: no such field; did you mean learning_rate?",
        "min_group_size: 9 is above completions_per_prompt, which is 4",
        "lora_rank: backend 'serverless' trains LoRA adapters only: set a rank, for example 8",
    ]


def test_a_rule_between_fields_is_silent_while_one_of_them_is_wrong_by_itself():
    assert problems(completions_per_prompt=0, min_group_size=3) == [
        "completions_per_prompt: Input should be greater than or equal to 1 (got 0)"
    ]


def test_rules_of_provisioning_are_checked_together_with_wrong_fields():
    assert problems(
        backend="emulator-dedicated",
        trainer={"job_id": "job-of-mine"},
        deployment={"weight_sync_scope": "per_deployment"},
        learning_rate=-1.0,
    ) == [
        "learning_rate: Input should be greater than or equal to 0 (got -1.0)",
        "deployment: weight_sync_scope 'per_deployment' is fixed when the trainer job is created: "
        "it can't be combined with the job_id of an existing one",
    ]


def test_missing_fields_are_all_named():
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    assert str(caught.value).splitlines()[1:] == [
        "  rollout: Field required",
        "  dataset: Field required",
        "  base_model: Field required",
        "  lora_rank: backend 'serverless' trains LoRA adapters only: set a rank, for example 8",
        "  tokenizer_model: backend 'serverless' needs it, for example 'Qwen/Qwen3.8-27B'",
    ]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"max_head_off_policy_versions": 1},
            "max_head_off_policy_versions: no such field; did you mean "
            "max_head_offpolicy_versions?",
        ),
        (
            {"rollout": {"name": "a:b", "kwrgs": {}}},
            "rollout.kwrgs: no such field; did you mean kwargs?",
        ),
        (
            {"backend": "dedicated", "trainer": {"training_shap": "s"}},
            "trainer.training_shap: no such field; did you mean training_shape?",
        ),
        ({"zzz": 1}, "zzz: no such field"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(fields: dict[str, Any], line: str):
    assert problems(**fields) == [line]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", "3"),
        ("epochs", 3.0),
        ("epochs", True),
        ("shuffle", "yes"),
        ("shuffle", 1),
        ("temperature", "0.5"),
        ("base_model", 7),
        ("extras", []),
    ],
)
def test_a_wrong_type_is_refused_not_converted(field: str, value: object):
    (line,) = problems(**{field: value})
    assert line.startswith(f"{field}: Input should be a valid ")


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "path",
    [
        "temperature",
        "learning_rate",
        "grad_clip_norm",
        "adam_eps",
        "rollout_timeout",
        "extras.x",
        "extras.deep.0",
        "loss_config.clip",
        "rollout.kwargs.x",
    ],
)
def test_nan_and_infinity_are_refused_wherever_they_are(path: str, number: float):
    value: Any = number
    field, *below = path.split(".")
    for part in reversed(below):
        value = [value] if part == "0" else {part: value}
    if field == "rollout":
        value = {"name": "my_task:make_rollout_fn", **value}
    (line,) = problems(**{field: value})
    assert line.startswith(f"{path}: Input should be a finite number")


def test_a_config_cant_be_changed():
    settings = config()
    with pytest.raises(ValidationError, match="frozen"):
        settings.epochs = 2
    with pytest.raises(ValidationError, match="frozen"):
        settings.rollout.name = "other:thing"


def test_a_config_says_whether_it_evaluates():
    assert not config().evaluates
    assert config(evaluation="my_task:evaluate").evaluates
    assert config(evaluation_dataset="held_out.jsonl").evaluates


def test_a_config_is_made_of_fields_only():
    with pytest.raises(ValidationError, match="Input should be a valid dictionary"):
        RunConfig.model_validate([SMALLEST])


def test_entry_points_are_written_bare_or_with_arguments():
    bare = config(rollout="pkg.task:Factory.make")
    assert bare.rollout == Entrypoint(name="pkg.task:Factory.make")
    detailed = config(
        rollout={"name": "task:make", "kwargs": {"style": "short"}},
        dataset={"name": "task:rows", "kwargs": {"count": 3}},
    )
    assert detailed.rollout.kwargs == {"style": "short"}
    assert detailed.dataset == Entrypoint(name="task:rows", kwargs={"count": 3})


def test_a_bare_dataset_is_a_path_even_if_it_looks_like_an_entry_point():
    assert config(dataset="s3://bucket/rows.parquet").dataset == "s3://bucket/rows.parquet"
    assert config(dataset="task:rows").dataset == "task:rows"


def test_a_config_survives_json():
    settings = config(
        extras={"deep": [1, {"a": None}]},
        loss_config={"clip_low": 0.2, "ratio": "token", "kl": True},
        evaluation_dataset={"name": "task:held_out"},
        learning_rate=1,
    )
    assert RunConfig.model_validate_json(settings.model_dump_json()) == settings
    assert parse_config(json.loads(settings.model_dump_json())) == settings


@pytest.mark.parametrize(("given", "kind"), [([], "list"), ("text", "str"), (None, "NoneType")])
def test_a_config_is_an_object(given: object, kind: str):
    with pytest.raises(ConfigError, match=f"is a JSON object, not {kind}"):
        parse_config(given)


def test_a_config_that_doesnt_fit_into_history_is_refused():
    assert MAX_CONFIG_BYTES == 64 * 1024

    def padded(size: int) -> dict[str, Any]:
        without = len(json.dumps(SMALLEST | {"extras": {"text": ""}}))
        return SMALLEST | {"extras": {"text": "x" * (size - without)}}

    assert parse_config(padded(MAX_CONFIG_BYTES)).extras
    with pytest.raises(ConfigError, match=f"has {MAX_CONFIG_BYTES + 1} bytes.*keep rows and"):
        parse_config(padded(MAX_CONFIG_BYTES + 1))


def test_the_json_schema_describes_every_field_for_editors():
    schema = RunConfig.model_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert set(schema["properties"]) == set(RunConfig.model_fields)
    assert schema["required"] == ["rollout", "dataset", "base_model"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["completions_per_prompt"] == {
        "default": 4,
        "description": "G, completions per row; 1 only with an `advantages` function of your own.",
        "maximum": 512,
        "minimum": 1,
        "title": "Completions Per Prompt",
        "type": "integer",
    }


@pytest.mark.parametrize(
    ("concurrency", "ahead", "warned"),
    [(None, 0, False), (8, 0, False), (9, 0, True), (9, 1, False), (16, 1, False), (17, 1, True)],
)
def test_concurrency_that_can_never_fill_is_warned_about(
    concurrency: int | None, ahead: int, warned: bool
):
    """The sizing check is O >= ceil(C/B) - 1; here B is 8."""
    settings = config(
        prompt_groups_per_step=2,
        max_concurrency_rollout_sample=concurrency,
        max_head_offpolicy_versions=ahead,
    )
    expected = [
        f"max_concurrency_rollout_sample={concurrency} can never fill: with batches of 8 "
        f"completions it takes max_head_offpolicy_versions >= {ahead + 1}, and it is {ahead}"
    ]
    assert settings.warnings() == (expected if warned else [])


def test_a_setting_that_is_passed_through_unknown_is_warned_about():
    assert config(loss="cispo", loss_config={"clip_lo": 0.7, "weighting": "tis"}).warnings() == [
        "loss_config.clip_lo isn't a setting of cispo that Everburn knows; it is passed through as "
        "it is"
    ]


def test_a_loss_and_advantages_of_ones_own_are_named_with_their_arguments():
    loss = {"name": "my_task:margin", "kwargs": {"margin": 0.1}}
    settings = config(loss=loss, advantages={"name": "my_task:reward"}, completions_per_prompt=1)
    assert settings.loss == Entrypoint(name="my_task:margin", kwargs={"margin": 0.1})
    assert settings.advantages == Entrypoint(name="my_task:reward")
    assert (settings.sent_loss_config, settings.clip) == ({}, None)
    assert [each.name for each in settings.trainer_entrypoints] == ["my_task:margin"]
    assert "my_task:reward" in [each.name for each in settings.rollout_entrypoints]
    assert parse_config(settings.model_dump(mode="json")) == settings


def test_the_settings_of_a_python_loss_are_its_arguments():
    assert problems(loss={"name": "my_task:margin"}, loss_config={"margin": 0.1}) == [
        "loss_config: belongs to the service's losses; a Python loss gets its settings as its "
        "kwargs"
    ]
    assert problems(loss={"name": "no colon"}) == [
        "loss.name: 'no colon' doesn't name a callable: write 'package.module:attribute', for "
        "example 'my_task:make_rollout_fn'"
    ]


@pytest.mark.parametrize(
    ("loss", "normalization", "warned"),
    [
        ("gspo", "num_loss_tokens", True),
        ("gspo", "num_sequences", False),
        ("gspo", "none", False),
        ("grpo", "num_loss_tokens", False),
    ],
)
def test_dividing_by_length_twice_is_warned_about(loss: str, normalization: str, warned: bool):
    found = config(loss=loss, grad_accumulation_normalization=normalization).warnings()
    assert len(found) == warned
    assert all("with 'num_sequences' a step is the mean over sequences" in each for each in found)


def test_sampling_without_temperature_is_warned_about():
    assert config(temperature=0).warnings() == [
        "temperature=0: all completions of a row are equal and train nothing"
    ]
