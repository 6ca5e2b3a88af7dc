"""A whole configuration, checked: every field by itself, and the rules between them, at once."""

import json
from typing import Any, Self

from pydantic import ModelWrapValidatorHandler, ValidationError, model_validator

from everburn.config.fields import PROVISIONING, RunFields
from everburn.config.problems import ConfigError, describe_problems, restated
from everburn.config.rules import broken_combinations, origin_problem, warnings_of

MAX_CONFIG_BYTES = 64 * 1024
"""A run's configuration travels in workflow history; more than this belongs in files."""


class RunConfig(RunFields):
    """The configuration of a run. Immutable; unknown fields are refused, and nothing is
    converted: `"3"` and `true` aren't counts."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_everything(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """One error holds every problem: if some fields are wrong, the rules between the others
        are still checked."""
        value = _with_tokenizer(value)
        try:
            config = handler(value)
        except ValidationError as error:
            if not isinstance(value, dict):
                raise
            problems = [restated(problem) for problem in error.errors(include_url=False)]
            wrong = {problem["loc"][0] for problem in problems}
            right = value.keys() & cls.model_fields.keys() - wrong
            draft = cls.model_construct(None, **{name: _read(name, value[name]) for name in right})
            problems += broken_combinations(draft, wrong)
        else:
            problems = broken_combinations(config, set())
            if not problems:
                return config
        raise ValidationError.from_exception_data(cls.__name__, problems)

    def origin_problem(self) -> str | None:
        """Why a new run can't start from `init_from_checkpoint`, or None."""
        return origin_problem(self)

    def warnings(self) -> list[str]:
        """Valid settings that their author probably didn't intend."""
        return warnings_of(self)


def _with_tokenizer(value: Any) -> Any:
    """The recipe's configurations name the tokenizer in `deployment`; Everburn needs it for every
    backend."""
    deployment = value.get("deployment") if isinstance(value, dict) else None
    named = deployment.get("tokenizer_model") if isinstance(deployment, dict) else None
    if not isinstance(named, str) or value.get("tokenizer_model") is not None:
        return value
    return value | {"tokenizer_model": named}


def parse_config(value: object) -> RunConfig:
    """Validate a decoded JSON value.

    Raises:
        ConfigError: with every problem and its path, one a line.
    """
    if not isinstance(value, dict):
        raise ConfigError(
            f"a run's configuration is a JSON object, not {type(value).__name__}: "
            "see examples/arithmetic/run.json"
        )
    size = len(json.dumps(value))
    if size > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration has {size} bytes, more than {MAX_CONFIG_BYTES}: keep rows and "
            "texts in files and name them"
        )
    try:
        return RunConfig.model_validate(value)
    except ValidationError as error:
        raise ConfigError(describe_problems(error, value)) from None


def _read(name: str, value: Any) -> Any:
    """A valid field's value, in the type that the rules between fields expect."""
    provisioning = PROVISIONING.get(name)
    return provisioning.model_validate(value) if provisioning and value is not None else value
