"""Vocabularies: Python and the tokenizer's files encode a text equally."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from everburn.emulator.models.vocabulary import END, PAD, Vocabulary

TOKENS = (PAD, END, "a", "ab", "abc", "b", "c", " a", "(", ".", "-", " ", "é", "\\")
VOCABULARY = Vocabulary(TOKENS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("tokenizer")
    VOCABULARY.write_tokenizer(folder)
    return AutoTokenizer.from_pretrained(str(folder))


def test_the_longest_token_is_taken() -> None:
    ids = VOCABULARY.encode("ababc a.")
    assert [TOKENS[number] for number in ids] == ["ab", "abc", " a", "."]


@given(parts=st.lists(st.sampled_from(TOKENS[1:])))
def test_the_tokenizer_encodes_like_the_vocabulary(tokenizer, parts: list[str]) -> None:
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert ids == VOCABULARY.encode(text)
    assert tokenizer.decode(ids) == text


def test_the_error_names_text_that_no_token_matches() -> None:
    with pytest.raises(ValueError, match="no token matches 'xyz'"):
        VOCABULARY.encode("abxyz")


@pytest.mark.parametrize("tokens", [(END, "a"), (PAD, "a"), (PAD, END, "a", "a"), (PAD, END, "")])
def test_tokens_must_be_unique_and_include_pad_and_end(tokens: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="unique texts"):
        Vocabulary(tokens)


def test_only_the_end_token_may_hold_the_end() -> None:
    with pytest.raises(ValueError, match="ends an answer"):
        Vocabulary((PAD, END, "a\n"))
