"""What a configuration refers to by name: the user's callables, files of rows, losses.

Owns the forms of the names. Doesn't own resolving them (usercode/entrypoints.py,
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


AdvantageName = Literal["group_zscore", "mean_only", "leave_one_out"]


def _source(form: str, names: tuple[str, ...] = (), unknown: str = "") -> BeforeValidator:
    """A bare string is a path, or one of `names`; a callable is written as an object.

    form: how to write a source. unknown: the error for another name, after the name.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str):
            if names and value not in names:
                raise ValueError(f"{value!r} {unknown}")
            return value
        if not isinstance(value, dict | Entrypoint):
            raise ValueError(form)
        return Entrypoint.model_validate(value)

    return BeforeValidator(check)


DatasetSource = Annotated[
    str | Entrypoint, _source('write a path or URL, or {"name": "package.module:function"}')
]
"""Rows: the path or URL of a .jsonl or .parquet file, or `{"name": "module:function"}`."""

LossSource = Annotated[
    LossName | Entrypoint,
    _source(
        'write the name of a loss, or {"name": "package.module:function"}',
        tuple(LOSSES),
        f"is no loss of the service ({', '.join(LOSSES)}); a Python loss is "
        'written as {"name": "package.module:function"}',
    ),
]
"""The objective: a loss of the service by name, or `{"name": "module:function"}`."""

AdvantageSource = Annotated[
    AdvantageName | Entrypoint,
    _source(
        'write a name, or {"name": "package.module:function"}',
        get_args(AdvantageName),
        f"is none of {', '.join(get_args(AdvantageName))}; a function of your own is "
        'written as {"name": "package.module:function"}',
    ),
]
"""Rewards of a group to advantages: by name, or `{"name": "module:function"}`."""
