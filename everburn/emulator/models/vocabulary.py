"""The token strings of a base model: text to ids, and the tokenizer's files.

Owns which token is taken where several fit: the longest. Doesn't own which tokens there are
(recipes).
"""

import re
from collections.abc import Sequence
from pathlib import Path

PAD = "<pad>"
END = "\n"
"""Ends an answer. Special to the tokenizer: no other token may hold it."""


class Vocabulary:
    """Token strings by id; PAD and END are among them.

    Raises:
        ValueError: PAD or END is missing, a token is there twice, or one holds END.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._ids = {token: number for number, token in enumerate(tokens)}
        if not {PAD, END} <= self._ids.keys() or len(self._ids) < len(tokens) or "" in self._ids:
            raise ValueError(f"tokens are different texts, {PAD!r} and {END!r} among them")
        if any(END in token for token in tokens if token != END):
            raise ValueError(f"a token holds {END!r}, which ends an answer")
        self._pattern = re.compile(_pattern(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pad_id(self) -> int:
        return self._ids[PAD]

    @property
    def end_id(self) -> int:
        return self._ids[END]

    def encode(self, text: str) -> list[int]:
        """Token ids, as the tokenizer gives them.

        Raises:
            ValueError: no token fits somewhere.
        """
        ids, place = [], 0
        while place < len(text):
            found = self._pattern.match(text, place)
            if found is None:
                raise ValueError(f"no token begins like {text[place : place + 20]!r}")
            ids.append(self._ids[found.group()])
            place = found.end()
        return ids

    def write_tokenizer(self, folder: Path) -> None:
        """The files that `AutoTokenizer.from_pretrained` reads."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(self.tokens)), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
        ).save_pretrained(folder)


def _pattern(tokens: Sequence[str]) -> str:
    """Alternatives are tried in order: the longest first."""
    return "|".join(map(_escaped, sorted(tokens, key=len, reverse=True)))


def _escaped(token: str) -> str:
    """For Python's expressions and the tokenizer's alike, which know different escapes."""
    return re.sub(r"[\\^$.|?*+()\[\]{}-]", r"\\\g<0>", token)
