"""Policies with scripted answers, and a chat model's tokenizer without the model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from everburn.rollouts.contract import PromptTooLongError, RolloutSetup, Sample
from everburn.rollouts.sampling import PolicySampler

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3 = (*CHATML, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINKING = ("<think>", "</think>")


def qwen3_tokenizer(folder: Path) -> Any:
    """A byte tokenizer with Qwen3's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CHATML])
    tokenizer.add_tokens([AddedToken(token) for token in (*QWEN3[len(CHATML) :], *THINKING)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(str(folder))


class ScriptedPolicy:
    """Answers with one text after the other; token k of answer n has the logprob -(n + k/1000).

    Answers are cut off at `max_tokens`. context: longer prompts are refused, like by the sampler
    at max_seq_len.
    """

    def __init__(
        self,
        tokenizer: Any,
        answers: Sequence[str] | Callable[[int], str],
        context: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._answers = answers
        self._context = context
        self.prompts: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.settings: list[dict[str, Any]] = []

    async def sample(self, prompt_tokens: Sequence[int], **settings: Any) -> Sample:
        if self._context is not None and len(prompt_tokens) > self._context:
            raise PromptTooLongError("no room")
        number = len(self.prompts)
        said = self._answers(number) if callable(self._answers) else self._answers[number]
        tokens = list(self._tokenizer.encode(said, add_special_tokens=False))
        limit = settings.get("max_tokens") or len(tokens)
        cut = tokens[:limit]
        self.prompts.append(list(prompt_tokens))
        self.outputs.append(cut)
        self.settings.append(settings)
        return Sample(
            tokens=cut,
            logprobs=[-(number + 1 + k / 1000) for k in range(len(cut))],
            raw_logprobs=None,
            text=self._tokenizer.decode(cut, skip_special_tokens=True),
            finish_reason="length" if len(cut) < len(tokens) else "stop",
            version=0,
        )


def setup_of(policy: ScriptedPolicy, tokenizer: Any, **changes: Any) -> RolloutSetup:
    """The argument of a rollout factory, with a scripted policy as sampler."""
    values: dict[str, Any] = {
        "tokenizer": tokenizer,
        "tokenizer_id": "test",
        "sampling_kwargs": {"max_tokens": 200, "temperature": 1.0},
        "sampler": cast(PolicySampler, policy),
        "model": "test",
        "completions_per_prompt": 2,
        "extras": {},
        "sandboxes": None,
    }
    return RolloutSetup(**values | changes)
