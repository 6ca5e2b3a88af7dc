"""Prompts of HUD environments as exact token ids, and sampled ids as text.

Owns the choice of a renderer by its name. Doesn't own the renderers (the `renderers` package) nor
the sampling between the two.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from everburn.sampling import Sample

PLAIN = "plain"
_NO_THINKING = "_disable_thinking"

Messages = list[dict[str, Any]]


class RenderingError(ValueError):
    """A renderer that doesn't exist or doesn't fit, or a prompt that isn't text. Fatal."""


class Rendering(Protocol):
    """Between messages and tokens."""

    @property
    def stop(self) -> list[int] | None:
        """Tokens that end a turn; None leaves that to the model."""
        ...

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids up to where the model's turn begins."""
        ...

    def text(self, prompt: list[int], sample: Sample) -> str:
        """What the model said, without thoughts and control tokens."""
        ...


@dataclass(frozen=True)
class PlainRendering:
    """The messages' texts as they are, for base models that continue text."""

    tokenizer: Any
    stop: None = None

    def prompt(self, messages: Messages) -> list[int]:
        text = "\n\n".join(message["content"] for message in messages)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, prompt: list[int], sample: Sample) -> str:
        return sample.text


class ChatRendering:
    """A chat model's own format, by the `renderers` package."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self.stop: list[int] | None = list(renderer.get_stop_token_ids())

    def prompt(self, messages: Messages) -> list[int]:
        return list(self._renderer.render_ids(messages, add_generation_prompt=True))

    def text(self, prompt: list[int], sample: Sample) -> str:
        return str(self._renderer.parse_response(sample.tokens, prompt_ids=prompt).content)


def make_rendering(name: str | None, tokenizer: Any) -> Rendering:
    """The renderer of a name: "plain", a name of the `renderers` package ("qwen3.8"), or the same
    as other recipes write it ("qwen3_8", "qwen3_8_disable_thinking").

    None means plain, which a model with a chat template isn't given by accident.

    Raises:
        RenderingError
    """
    if name is None and getattr(tokenizer, "chat_template", None) is not None:
        raise RenderingError(
            "this model has a chat template: name its renderer, for example "
            '"renderer": "qwen3_8_disable_thinking", or "plain" for no format at all'
        )
    if name in (None, PLAIN):
        return PlainRendering(tokenizer)
    assert name is not None
    from renderers import create_renderer

    try:
        return ChatRendering(create_renderer(tokenizer, _renderer_config(name)))
    except RenderingError:
        raise
    except Exception as error:
        raise RenderingError(
            f"renderer {name!r} doesn't fit the tokenizer: {type(error).__name__}: {error}"
        ) from error


def as_messages(prompt: object) -> Messages:
    """An environment's prompt as chat messages, roles as they are.

    Raises:
        RenderingError: it holds something else than text.
    """
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise RenderingError(f"the environment's prompt is {prompt!r}, neither text nor messages")
    return [_message(item) for item in prompt]


def _message(item: object) -> dict[str, Any]:
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
    raise RenderingError(f"the environment's prompt holds {kind!r}: only text can be rendered")


def _renderer_config(name: str) -> Any:
    from renderers import config_from_name

    base = name.removesuffix(_NO_THINKING)
    for candidate in (base, base.replace("_", "."), base.replace("_", "-")):
        try:
            config = config_from_name(candidate)
        except ValueError:
            continue
        if config is None:
            break  # "auto" may ask a hub
        if base == name:
            return config
        if "enable_thinking" not in type(config).model_fields:
            raise RenderingError(f"renderer {base!r} has no thinking that {name!r} could disable")
        return type(config)(enable_thinking=False)
    raise RenderingError(
        f"there is no renderer {name!r}: write 'plain', or a name of the renderers package such as "
        "'qwen3.8', with '_disable_thinking' behind it where the model shouldn't think"
    )
