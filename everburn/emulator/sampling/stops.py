"""When a completion ends before its token budget: end tokens and stop strings.

Owns matching stop strings against tokens, without decoding at each token, and the text that stays
before them.
"""

from collections.abc import Sequence
from typing import Any

_BYTES_PER_CHARACTER = 4
"""A byte-level token may hold as little as a quarter of a character."""

_BROKEN = "\ufffd"
"""What a tokenizer shows for bytes that are not a whole character."""


class StopStrings:
    """Stop strings of one request."""

    def __init__(self, enders: "EnderCache", strings: Sequence[str]) -> None:
        self._tokenizer = enders.tokenizer
        self._strings = strings
        self._enders = [enders.of(string) for string in strings]
        self._window = [_BYTES_PER_CHARACTER * (len(string) + 1) for string in strings]

    def match(self, tokens: Sequence[int]) -> str | None:
        """The stop string that the last token completes, or None."""
        last = tokens[-1]
        for string, enders, window in zip(self._strings, self._enders, self._window, strict=True):
            if last in enders:
                # Special tokens are kept: the SDK sends stop token ids as their decoded text.
                text = self._tokenizer.decode(tokens[-window:], skip_special_tokens=False)
                if string in text:
                    return string
        return None

    def text_before(self, tokens: Sequence[int], stop: str) -> str:
        """The text, without special tokens, of a completion that ends with `stop`."""
        for count in range(1, len(tokens) + 1):
            tail: str = self._tokenizer.decode(tokens[-count:], skip_special_tokens=False)
            if stop in tail:
                head: str = self._tokenizer.decode(tokens[:-count], skip_special_tokens=True)
                return head + tail[: tail.rindex(stop)]
        raise ValueError(f"the tokens do not end with {stop!r}")


class EnderCache:
    """For each stop string over one tokenizer, the tokens that can complete it: those that hold its
    last character.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._texts: list[str] | None = None
        self._enders: dict[str, frozenset[int]] = {}

    def of(self, string: str) -> frozenset[int]:
        character = string[-1]
        if character not in self._enders:
            self._enders[character] = frozenset(
                token
                for token, text in enumerate(self._token_texts())
                if character in text or _BROKEN in text
            )
        return self._enders[character]

    def _token_texts(self) -> list[str]:
        if self._texts is None:
            known = min(self._vocabulary, len(self.tokenizer))
            self._texts = [
                self.tokenizer.decode([token], skip_special_tokens=False) for token in range(known)
            ]
        return self._texts
