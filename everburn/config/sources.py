"""What a configuration names rather than holds: callables of the user, files of rows, losses.

Owns the forms in which they are written. Doesn't own resolving them (usercode/entrypoints.py,
rollouts/dataset.py).
"""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from everburn.learning.losses import LOSSES, LossName

_ENTRYPOINT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Entrypoint(BaseModel):
    """A Python callable by name, `package.module:attribute`, with its keyword arguments.

    In JSON either the bare name or `{"name": "package.module:attribute", "kwargs": {...}}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_name(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Entrypoint):
            raise ValueError("write 'package.module:attribute', or an object with that as its name")
        return {"name": value} if isinstance(value, str) else value

    @field_validator("name")
    @classmethod
    def _check_form(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            raise ValueError(
                f"{value!r} doesn't name a callable: write 'package.module:attribute', "
                "for example 'my_task:make_rollout_fn'"
            )
        return value


def _source(value: Any) -> Any:
    """A bare string is a path or URL; a callable that returns rows is written as an object."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | Entrypoint):
        raise ValueError('write a path or URL, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


DatasetSource = Annotated[str | Entrypoint, BeforeValidator(_source)]
"""Rows: the path or URL of a .jsonl or .parquet file, or `{"name": "module:function"}`."""


def _loss(value: Any) -> Any:
    """A bare string names a loss of the service; a Python function is written as an object."""
    if isinstance(value, str):
        if value not in LOSSES:
            raise ValueError(
                f"{value!r} is no loss of the service ({', '.join(LOSSES)}); a Python loss is "
                'written as {"name": "package.module:function"}'
            )
        return value
    if not isinstance(value, dict | Entrypoint):
        raise ValueError('write the name of a loss, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


LossSource = Annotated[LossName | Entrypoint, BeforeValidator(_loss)]
"""What is minimised: a loss of the service by name, or `{"name": "module:function"}`."""


def _advantages(value: Any) -> Any:
    """As `_loss`: a bare string is one of Everburn's own functions."""
    if isinstance(value, str) and value not in get_args(AdvantageName):
        raise ValueError(
            f"{value!r} is none of {', '.join(get_args(AdvantageName))}; a function of your own is "
            'written as {"name": "package.module:function"}'
        )
    if isinstance(value, str | Entrypoint):
        return value
    if not isinstance(value, dict):
        raise ValueError('write a name, or {"name": "package.module:function"}')
    return Entrypoint.model_validate(value)


AdvantageName = Literal["group_zscore", "mean_only", "leave_one_out"]


AdvantageSource = Annotated[AdvantageName | Entrypoint, BeforeValidator(_advantages)]
"""Rewards of a group to advantages: by name, or `{"name": "module:function"}`."""
