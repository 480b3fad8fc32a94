"""The text of a completion grows by whole characters, without any part of a stop text, for any batches of tokens."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.service.in_process import CATALOGUE
from tuneship.service.generation.completion_text import UNFINISHED, AnswerCut, Completion

TOKENIZER: Any = CATALOGUE.default.tokenizer
STOPS = st.lists(st.text("ab é🙂", min_size=1, max_size=4), max_size=4)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def unfold(tokens: list[int], stops: list[str]) -> tuple[Completion, list[str]]:
    completion = Completion(TOKENIZER.decode, AnswerCut(stops=stops))
    pieces: list[str] = []
    for token in tokens:
        pieces.append(completion.take(token))
        if completion.is_stopped:
            return completion, pieces
    return completion, [*pieces, completion.finish()]


@given(st.text("ab é🙂中\n", max_size=30))
def test_without_stop_texts_the_pieces_are_the_decoded_text(text: str) -> None:
    completion, pieces = unfold(tokens_of(text), [])
    assert "".join(pieces) == completion.text == text
    assert all(UNFINISHED not in piece for piece in pieces)


@given(st.lists(st.integers(5, CATALOGUE.default.tokenizer.get_vocab_size() - 1), max_size=40))
def test_tokens_that_are_no_text_come_out_as_the_decoder_writes_them(tokens: list[int]) -> None:
    assert "".join(unfold(tokens, [])[1]) == TOKENIZER.decode(tokens)


@given(st.text("ab é🙂", max_size=30), STOPS)
def test_nothing_of_a_stop_text_is_ever_given(text: str, stops: list[str]) -> None:
    completion, pieces = unfold(tokens_of(text), stops)
    places = [text.find(stop) for stop in stops if stop in text]
    assert completion.is_stopped == bool(places)
    assert text.startswith(completion.text)
    assert "".join(pieces) == completion.text
    if not places:
        assert completion.text == text
        return
    assert not any(stop in completion.text for stop in stops)
    rest = text[len(completion.text) :]
    assert any(rest.startswith(stop) for stop in stops)


def test_a_character_of_several_tokens_is_given_whole() -> None:
    tokens = tokens_of("a🙂b")
    assert len(tokens) > 3, "the tokenizer has a token for it: take a rarer one"
    _, pieces = unfold(tokens, [])
    assert [piece for piece in pieces if piece] == ["a", "🙂", "b"]


def test_a_possible_beginning_of_a_stop_text_waits_until_it_is_certain() -> None:
    """Each character is a token, so the stop text spans several tokens."""
    completion = Completion(lambda tokens: "".join(map(chr, tokens)), AnswerCut(stops=["END"]))
    given_so_far = [completion.take(ord(letter)) for letter in "xENyEND"]
    assert given_so_far == ["x", "", "", "ENy", "", "", ""]
    assert completion.is_stopped
    assert (completion.text, completion.tokens, completion.finish()) == ("xENy", 7, "")


def test_a_beginning_that_stays_one_is_given_at_the_end() -> None:
    completion = Completion(lambda tokens: "".join(map(chr, tokens)), AnswerCut(stops=["END"]))
    assert [completion.take(ord(letter)) for letter in "xEN"] == ["x", "", ""]
    assert completion.finish() == "EN"
    assert not completion.is_stopped


@pytest.mark.parametrize("stops", [["b", "ab"], ["ab", "b"]])
def test_the_first_of_two_stop_texts_in_one_token_counts(stops: list[str]) -> None:
    completion = Completion(lambda tokens: "xab" * len(tokens), AnswerCut(stops=stops))
    assert completion.take(1) == "x"


AROUND = st.text(" \nab", max_size=3)


@given(lead=AROUND, pad=AROUND, text=st.text(" \nab é", max_size=12), has_ended=st.booleans())
def test_text_of_the_template_around_an_answer_is_left_out(
    lead: str, pad: str, text: str, has_ended: bool
) -> None:
    whole = lead + text + pad
    cut = AnswerCut(tokens_of("x:"), lead, pad)
    completion = Completion(TOKENIZER.decode, cut)
    pieces = [completion.take(token) for token in tokens_of("x:" + whole)[len(cut.before) :]]
    pieces.append(completion.finish(has_ended=has_ended))
    assert "".join(pieces) == completion.text == (text if has_ended else text + pad)
    assert completion.left_out == len(lead)


def test_an_answer_that_ends_within_the_lead_is_given() -> None:
    completion = Completion(TOKENIZER.decode, AnswerCut(lead="<think>"))
    assert [completion.take(token) for token in tokens_of("<th")][-1] == ""
    assert completion.finish(has_ended=True) == "<th"
