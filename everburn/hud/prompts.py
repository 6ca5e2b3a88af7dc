"""Prompts of HUD environments: conversion to chat messages, and formats by name.

Doesn't own formats (agentic/formats.py).
"""

from collections.abc import Sequence
from typing import Any

from everburn.agentic.formats import Format, FormatError, RendererFormat, TextFormat
from everburn.agentic.messages import Message

PLAIN = "plain"
_NO_THINKING = "_disable_thinking"
_EXAMPLE = "qwen3_8_disable_thinking"


class PromptError(ValueError):
    """The prompt isn't text. Fatal."""


def make_format(name: str | None, tokenizer: Any) -> Format:
    """The format with a name: "plain" (unchanged texts, for models that continue text), or a name
    of the `renderers` package, in its own spelling ("qwen3.8") or in the Fireworks recipe's
    ("qwen3_8", "qwen3_8_disable_thinking"). None means plain; for a model with a chat template,
    plain must be explicit.

    Raises:
        FormatError
    """
    if name is None and getattr(tokenizer, "chat_template", None) is not None:
        raise FormatError(
            f"this model has a chat template: name its renderer, for example {_EXAMPLE!r}, or "
            f"{PLAIN!r} for unchanged texts"
        )
    if name in (None, PLAIN):
        return TextFormat(tokenizer, _plain_text)
    assert name is not None
    base = name.removesuffix(_NO_THINKING).replace("_", ".")
    thinking = {"enable_thinking": False} if name.endswith(_NO_THINKING) else {}
    return RendererFormat(tokenizer, {"name": base} | thinking)


def as_messages(prompt: object) -> list[Message]:
    """An environment's prompt as chat messages, with their roles.

    Raises:
        PromptError: the prompt isn't all text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise PromptError(f"the environment's prompt is {prompt!r}, neither text nor messages")
    return [_message(item) for item in prompt]


def _plain_text(messages: Sequence[Message]) -> str:
    return "".join(message["content"] for message in messages)


def _message(item: object) -> Message:
    if not isinstance(item, dict):
        return {"role": "user", "content": str(item)}
    content = item.get("content")
    blocks = content if isinstance(content, list) else [content]
    return {"role": item.get("role", "user"), "content": "\n".join(map(_text, blocks))}


def _text(block: object) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, dict) and isinstance(block.get("text"), str):
        return str(block["text"])
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    raise PromptError(f"the environment's prompt holds {kind!r}: only text can be rendered")
