"""Formats by name, prompts of environments, and invalid prompts."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from everburn.agentic.formats import FormatError
from everburn.hud.prompts import PromptError, as_messages, make_format

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


@pytest.fixture(scope="module")
def qwen() -> Any:
    """One token per byte, and Qwen's control tokens: enough for its renderer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>")
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def test_the_recipes_renderer_disables_thinking(qwen: Any) -> None:
    format = make_format("qwen3_8_disable_thinking", qwen)
    prompt = format.render(as_messages("2 * 3?"))
    assert qwen.decode(prompt) == (
        "<|im_start|>user\n2 * 3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert format.parse(prompt, qwen.encode("it is\n6<|im_end|>")).content == "it is\n6"


def test_roles_are_kept_and_the_answer_excludes_thoughts(qwen: Any) -> None:
    format = make_format("qwen3.8", qwen)
    prompt = format.render(
        as_messages(
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "2 * 3?"}]},
            ]
        )
    )
    text = qwen.decode(prompt)
    assert "<|im_start|>system\n" in text
    assert "be brief" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert format.parse(prompt, qwen.encode("hm\n</think>\n\n6<|im_end|>")).content == "6"


def test_a_plain_prompt_is_its_text(qwen: Any) -> None:
    format = make_format("plain", qwen)
    prompt = format.render(as_messages("47+85="))
    assert qwen.decode(prompt) == "47+85="
    assert format.parse(prompt, qwen.encode("132")).content == "132"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (None, "has a chat template: name its renderer"),
        ("qwen9", "there is no renderer 'qwen9'"),
        ("auto", "name the model's renderer"),
        ("llama-3_disable_thinking", "enable_thinking"),
        ("llama-3", "doesn't fit the tokenizer"),
    ],
)
def test_an_unsuitable_renderer_is_refused(qwen: Any, name: str | None, complaint: str) -> None:
    with pytest.raises(FormatError, match=complaint):
        make_format(name, qwen)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (None, "neither text nor messages"),
        ([], "neither text nor messages"),
        ([{"role": "user", "content": {"type": "image", "data": "..."}}], "holds 'image'"),
    ],
)
def test_a_prompt_that_isnt_text_is_refused(prompt: object, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint):
        as_messages(prompt)
