"""Tokenizers of the agentic tests."""

from pathlib import Path
from typing import Any

import pytest

from everburn.emulator.models.base_model import TINY, tokenizer_path
from support.policies import qwen3_tokenizer


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen3's special tokens over single bytes."""
    return qwen3_tokenizer(Path(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """The emulator's tiny model: one token per character, no chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer_path(TINY)))
