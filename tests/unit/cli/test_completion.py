"""Bash splits words at colons, which are in the ids of models."""

import pytest

from tuneship.cli.completion import join_at_colons


@pytest.mark.parametrize(
    ("words", "cursor", "joined", "place", "kept"),
    [
        ("tuneship models get ft : tiny : no", 7, "tuneship models get ft:tiny:no", 3, "ft:tiny:"),
        ("tuneship models get ft :", 4, "tuneship models get ft:", 3, "ft:"),
        ("tuneship models get f", 3, "tuneship models get f", 3, ""),
        ("tuneship models get ", 3, "tuneship models get", 3, ""),
        ("tuneship login http : //a : 80 --cl", 7, "tuneship login http://a:80 --cl", 3, ""),
        ("tuneship generate dep_1 'a b: c' --j", 4, "tuneship generate dep_1 'a b: c' --j", 4, ""),
    ],
)  # fmt: skip
def test_words_that_bash_split_at_colons_are_one_word(
    words: str, cursor: int, joined: str, place: int, kept: str
) -> None:
    environment = {"COMP_WORDS": words, "COMP_CWORD": str(cursor)}
    assert join_at_colons(environment) == kept
    assert (environment["COMP_WORDS"], environment["COMP_CWORD"]) == (joined, str(place))


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"COMP_WORDS": "tuneship 'a : b", "COMP_CWORD": "3"},
        {"COMP_WORDS": "tuneship a : b", "COMP_CWORD": "x"},
        {"COMP_CWORD": "3"},
    ],
)
def test_unreadable_completion_variables_stay(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert join_at_colons(environment) == ""
    assert environment == before
