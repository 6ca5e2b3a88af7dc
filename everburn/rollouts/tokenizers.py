"""The tokenizer of a run. Doesn't own the emulator's tokenizers (emulator/models/base_model.py)."""

from functools import lru_cache
from typing import Any

from everburn.config import RunConfig


class TokenizerError(ValueError):
    """A tokenizer can't be loaded; names it and the remedy."""


def tokenizer_name(config: RunConfig) -> str:
    """The tokenizer's id: `tokenizer_model`, else the base model's own."""
    return config.tokenizer_model or config.base_model


def load_tokenizer(config: RunConfig) -> Any:
    """A transformers tokenizer, loaded once per process.

    Raises:
        TokenizerError
    """
    return _load(tokenizer_name(config))


@lru_cache(maxsize=4)
def _load(name: str) -> Any:
    from transformers import AutoTokenizer

    from everburn.emulator.models import base_model

    try:
        source = base_model.tokenizer_path(name) if base_model.is_known(name) else name
        return AutoTokenizer.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"can't load the tokenizer {name!r}: {error}. Set tokenizer_model to a Hugging Face id "
            "or to a local folder"
        ) from error
