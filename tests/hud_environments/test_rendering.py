"""Renderers by name, prompts of environments, and what can't be rendered."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from everburn.hud.rendering import RenderingError, as_messages, make_rendering
from everburn.sampling import Sample

SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


@pytest.fixture(scope="module")
def qwen() -> Any:
    """A token a byte, and Qwen's control tokens: what its renderer needs of a tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>")
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def sampled(tokenizer: Any, text: str) -> Sample:
    tokens = tokenizer.encode(text)
    return Sample(tokens, [0.0] * len(tokens), None, text, "stop", 0)


def test_the_recipes_renderer_disables_thinking(qwen: Any) -> None:
    rendering = make_rendering("qwen3_8_disable_thinking", qwen)
    prompt = rendering.prompt(as_messages("2 * 3?"))
    assert qwen.decode(prompt) == (
        "<|im_start|>user\n2 * 3?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert qwen.convert_tokens_to_ids("<|im_end|>") in (rendering.stop or [])
    assert rendering.text(prompt, sampled(qwen, "it is\n6<|im_end|>")) == "it is\n6"


def test_roles_are_kept_and_thoughts_are_no_answer(qwen: Any) -> None:
    rendering = make_rendering("qwen3.8", qwen)
    prompt = rendering.prompt(
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
    assert rendering.text(prompt, sampled(qwen, "hm\n</think>\n\n6<|im_end|>")) == "6"


def test_a_plain_prompt_is_its_text(qwen: Any) -> None:
    rendering = make_rendering("plain", qwen)
    prompt = rendering.prompt(as_messages("47+85="))
    assert qwen.decode(prompt) == "47+85="
    assert rendering.stop is None
    assert rendering.text(prompt, sampled(qwen, "132")) == "132"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (None, "has a chat template: name its renderer"),
        ("qwen9", "there is no renderer 'qwen9'"),
        ("auto", "there is no renderer 'auto'"),
        ("llama_3_disable_thinking", "no thinking that"),
        ("llama-3", "doesn't fit the tokenizer"),
    ],
)
def test_a_renderer_that_wont_do_is_refused_by_name(
    qwen: Any, name: str | None, complaint: str
) -> None:
    with pytest.raises(RenderingError, match=complaint):
        make_rendering(name, qwen)


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        (None, "neither text nor messages"),
        ([], "neither text nor messages"),
        ([{"role": "user", "content": {"type": "image", "data": "..."}}], "holds 'image'"),
    ],
)
def test_a_prompt_that_isnt_text_is_refused(prompt: object, complaint: str) -> None:
    with pytest.raises(RenderingError, match=complaint):
        as_messages(prompt)
