"""Stop strings: matching against tokens, without decoding at each token."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

_BYTES_PER_CHARACTER = 4
"""A byte-level token may hold only a quarter of a character."""

_PARTIAL = "\ufffd"
"""A tokenizer's output for bytes that aren't a whole character."""


class StopStrings:
    """Stop strings of one request."""

    def __init__(self, stop_tokens: "StopTokens", strings: Sequence[str]) -> None:
        self._tokenizer = stop_tokens.tokenizer
        self._strings = strings
        self._last = [stop_tokens.completing(string) for string in strings]
        self._window = [_BYTES_PER_CHARACTER * (len(string) + 1) for string in strings]

    def match(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last token completes, if any."""
        for string, last, window in zip(self._strings, self._last, self._window, strict=True):
            if tokens[-1] in last:
                # Special tokens are kept: the SDK sends stop token ids as their decoded text.
                text = self._tokenizer.decode(tokens[-window:], skip_special_tokens=False)
                if string in text:
                    return string
        return None

    def text_before(self, tokens: Sequence[int], stop: str) -> str:
        """The text before `stop`, at which the completion ends, without special tokens."""
        for count in range(1, len(tokens) + 1):
            tail: str = self._tokenizer.decode(tokens[-count:], skip_special_tokens=False)
            if stop in tail:
                head: str = self._tokenizer.decode(tokens[:-count], skip_special_tokens=True)
                return head + tail[: tail.rindex(stop)]
        raise ValueError(f"the tokens do not end with {stop!r}")


class StopTokens:
    """The tokens that can complete a stop string: those that hold its last character."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._by_character: dict[str, frozenset[int]] = {}

    def completing(self, string: str) -> frozenset[int]:
        character = string[-1]
        if character not in self._by_character:
            self._by_character[character] = frozenset(
                token
                for token, text in enumerate(self._texts)
                if character in text or _PARTIAL in text
            )
        return self._by_character[character]

    @cached_property
    def _texts(self) -> list[str]:
        count = min(self._vocabulary, len(self.tokenizer))
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in range(count)]
