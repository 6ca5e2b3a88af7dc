"""Search over a few paragraphs: TF-IDF with cosine similarity."""

import math
import re
from collections import Counter
from collections.abc import Sequence


class Search:
    """A search index over paragraphs."""

    def __init__(self, paragraphs: Sequence[str]) -> None:
        self._paragraphs = list(paragraphs)
        counts = [Counter(words(paragraph)) for paragraph in paragraphs]
        holding = Counter(word for count in counts for word in count)
        self._idf = {word: math.log(1 + len(counts) / n) for word, n in holding.items()}
        self._vectors = [self._vector(count) for count in counts]

    def top(self, query: str, count: int = 2) -> list[str]:
        """The most similar paragraphs, best first, without those that share no word."""
        wanted = self._vector(Counter(words(query)))
        scores = [
            sum(weight * vector.get(word, 0.0) for word, weight in wanted.items())
            for vector in self._vectors
        ]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:count]
        return [self._paragraphs[index] for index in best if scores[index] > 0]

    def _vector(self, counts: Counter[str]) -> dict[str, float]:
        """The weighted words, normalized to length 1 unless no word is known."""
        weights = {word: n * self._idf[word] for word, n in counts.items() if word in self._idf}
        length = math.sqrt(math.fsum(weight**2 for weight in weights.values()))
        return {word: weight / length for word, weight in weights.items()}


def words(text: str) -> list[str]:
    """Lower-case words and numbers."""
    return re.findall(r"\w+", text.lower())
