"""How similar two texts are, from 0 to 1."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

_WORD = re.compile(r"\w+")
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)

Measure = Callable[[str, str], float]


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words."""
    words, wanted = _words(answer), _words(reference)
    return _f1(LCSseq.similarity(words, wanted), words, wanted)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def token_f1(answer: str, reference: str) -> float:
    """F1 of the common words in any order, without articles and punctuation, as SQuAD defines it."""
    words, wanted = _squad_words(answer), _squad_words(reference)
    return _f1((Counter(words) & Counter(wanted)).total(), words, wanted)


def _squad_words(text: str) -> list[str]:
    return _ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _f1(common: int, words: Sequence[str], wanted: Sequence[str]) -> float:
    if not words or not wanted:
        return float(not words and not wanted)
    # The harmonic mean of common / words and common / wanted.
    return 2 * common / (len(words) + len(wanted))


def fuzzy_match(answer: str, reference: str) -> float:
    """The share of characters that stay when one text is made of the other by insertions and deletions."""
    return fuzz.ratio(answer, reference) / 100.0


def chrf_measure() -> Measure:
    """The function for chrF, of runs of characters. Raises ImportError without the extra `evaluation`."""
    chrf: Any = import_module("sacrebleu.metrics.chrf").CHRF()

    def measure(answer: str, reference: str) -> float:
        if answer == reference:
            return 1.0  # also where no run of characters is left
        return min(1.0, chrf.sentence_score(answer, [reference]).score / 100.0)

    return measure


MEASURES: Mapping[str, Measure] = {
    "rouge_l": rouge_l,
    "token_f1": token_f1,
    "fuzzy_match": fuzzy_match,
}
