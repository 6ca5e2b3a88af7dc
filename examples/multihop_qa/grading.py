"""Token F1, the score of extractive question answering (Rajpurkar et al., arXiv:1606.05250)."""

from collections import Counter

from examples.multihop_qa.search import words

ARTICLES = frozenset({"a", "an", "the"})


def token_f1(answer: str, truth: str) -> float:
    """Harmonic mean of precision and recall over words, without case, punctuation and articles;
    0 to 1."""
    said, right = (_counted(text) for text in (answer, truth))
    shared = (said & right).total()
    if not shared:
        return float(said == right)
    precision, recall = shared / said.total(), shared / right.total()
    return 2 * precision * recall / (precision + recall)


def _counted(text: str) -> Counter[str]:
    return Counter(word for word in words(text) if word not in ARTICLES)
