from everburn.emulator.sampling.stops import StopStrings, StopTokens


class Bytes:
    """A tokenizer over UTF-8 bytes and a few longer pieces, with one special token."""

    pieces = (*(bytes([value]) for value in range(256)), b"ab\n", b"</end>", b"<|im_end|>")

    def __len__(self) -> int:
        return len(self.pieces)

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        kept = [t for t in tokens if not (skip_special_tokens and t == len(self.pieces) - 1)]
        return b"".join(self.pieces[token] for token in kept).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = Bytes()


def stops_after(strings: list[str], tokens: list[int]) -> tuple[int, str] | None:
    """The number of tokens after which a stop string matches, and that string."""
    matcher = StopStrings(StopTokens(TOKENIZER, len(TOKENIZER)), strings)
    for count in range(1, len(tokens) + 1):
        if stop := matcher.match(tokens[:count]):
            return count, stop
    return None


def test_a_stop_string_may_span_tokens() -> None:
    assert stops_after(["end"], TOKENIZER.encode("the end.")) == (7, "end")


def test_a_stop_string_may_end_inside_a_token() -> None:
    assert stops_after(["xa"], [*TOKENIZER.encode("x"), 256]) == (2, "xa")


def test_a_stop_string_may_be_part_of_a_token() -> None:
    assert stops_after(["/en"], [257]) == (1, "/en")


def test_a_special_token_matches_by_its_text() -> None:
    assert stops_after(["<|im_end|>"], [*TOKENIZER.encode("so"), 258]) == (3, "<|im_end|>")


def test_a_character_of_several_tokens_is_found() -> None:
    assert stops_after(["日本"], TOKENIZER.encode("in 日本!")) == (9, "日本")


def test_an_absent_stop_string_does_not_match() -> None:
    assert stops_after(["zz", "日"], TOKENIZER.encode("a bz cz 月")) is None


def test_the_vocabulary_may_be_larger_than_the_tokenizer() -> None:
    assert StopTokens(TOKENIZER, 1000).completing("\n") == {10, 256} | set(range(128, 256))


def test_the_text_before_a_stop_string_leaves_out_special_tokens() -> None:
    stops = StopStrings(StopTokens(TOKENIZER, len(TOKENIZER)), ["d>", "<|im_end|>", "b"])
    assert stops.text_before([*TOKENIZER.encode("so"), 258, 257], "d>") == "so</en"
    assert stops.text_before([*TOKENIZER.encode("so"), 258], "<|im_end|>") == "so"
    assert stops.text_before([*TOKENIZER.encode("x"), 256], "b") == "xa"
