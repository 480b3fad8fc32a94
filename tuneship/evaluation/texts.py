"""Texts made comparable: white space, and what writers do not mean by punctuation, case and forms of a character."""

import unicodedata

import regex

_SPACE = regex.compile(r"\s+")
# Punctuation, separators, control and format characters. Marks stay: in some scripts they are vowels.
_NOT_SAID = regex.compile(r"[\p{P}\p{Z}\p{C}]+")


def spaced(text: str) -> str:
    """The text with white space as one space, and none at its ends."""
    return _SPACE.sub(" ", text).strip()


def folded(text: str) -> str:
    """The text in one case and one form of each character (NFKC)."""
    # Once more: folding may make what NFKC would compose.
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def said(text: str) -> str:
    """The words of a text: folded, with one space for punctuation and white space; spaced, where nothing is left."""
    return _NOT_SAID.sub(" ", folded(text)).strip() or spaced(text)


def squeezed(text: str) -> str:
    """The folded text without punctuation and white space; spaced, where nothing is left."""
    return _NOT_SAID.sub("", folded(text)) or spaced(text)
