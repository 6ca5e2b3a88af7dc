"""The token strings of a base model: encoding, and the tokenizer's files.

If several tokens match, the longest is taken. Doesn't own the tokens (recipes).
"""

import re
from collections.abc import Sequence
from pathlib import Path

PAD = "<pad>"
END = "\n"
"""Ends an answer. A special token: no other token may hold it."""


class Vocabulary:
    """Token strings by id; PAD and END are among them.

    Raises:
        ValueError: PAD or END is missing, a token is empty or repeated, or one holds END.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._ids = {token: number for number, token in enumerate(tokens)}
        if not {PAD, END} <= self._ids.keys() or len(self._ids) < len(tokens) or "" in self._ids:
            raise ValueError(f"tokens must be unique texts and include {PAD!r} and {END!r}")
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
        """Token ids, the same as the tokenizer's.

        Raises:
            ValueError: no token matches.
        """
        ids, position = [], 0
        while position < len(text):
            match = self._pattern.match(text, position)
            if match is None:
                raise ValueError(f"no token matches {text[position : position + 20]!r}")
            ids.append(self._ids[match.group()])
            position = match.end()
        return ids

    def write_tokenizer(self, folder: Path) -> None:
        """Write the files that `AutoTokenizer.from_pretrained` reads."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.WordLevel(self._ids, unk_token=PAD))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_pattern(self.tokens)), "isolated")
        tokenizer.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token=PAD, eos_token=END
        ).save_pretrained(folder)


def _pattern(tokens: Sequence[str]) -> str:
    """The longest tokens first: alternatives are tried in order."""
    return "|".join(map(_escaped, sorted(tokens, key=len, reverse=True)))


def _escaped(token: str) -> str:
    """Escaped for both Python's and the tokenizer's regular expressions."""
    return re.sub(r"[\\^$.|?*+()\[\]{}-]", r"\\\g<0>", token)
