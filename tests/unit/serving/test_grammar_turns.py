"""Owners take turns at the thread that compiles grammars, and nobody waits for a grammar that is kept."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S, until
from tuneship.serving.sampling.grammar import grammar_of
from tuneship.serving.sampling.grammar_turns import GrammarTurns
from tuneship.serving.sampling.guides import GrammarCompiler, Guide
from tuneship.serving.sequence import GenerateRequest

TINY = Path(__file__).parents[3] / "tuneship" / "base_models" / "tuneship-tiny"
STOPS = (1,)
VOCABULARY = json.loads((TINY / "config.json").read_text())["vocab_size"]


class HeldCompiler(GrammarCompiler):
    """Compiles only when it is released, and lists what it began with."""

    def __init__(self) -> None:
        super().__init__(TINY, VOCABULARY)
        self.released = threading.Semaphore(0)
        self.begun: list[str] = []

    def guide(self, grammar: str, stop_tokens: tuple[int, ...]) -> Guide:
        self.begun.append(grammar)
        assert self.released.acquire(timeout=PATIENCE_S)
        return super().guide(grammar, stop_tokens)


def grammar(name: str) -> str:
    return grammar_of({"const": name})


def request(owner: str, grammar: str, *, is_background: bool = False) -> GenerateRequest:
    more: dict[str, Any] = {"grammar": grammar, "is_background": is_background}
    return GenerateRequest((5,), 9, stop_tokens=STOPS, owner=owner, **more)


class Replica:
    """The turns, as a replica uses them."""

    def __init__(self) -> None:
        self.compiler = HeldCompiler()
        self.wakes = threading.Semaphore(0)
        self.turns = GrammarTurns(self.compiler, self.wakes.release)
        self.done: list[str] = []
        self.refused: list[str] = []

    def look(self) -> None:
        for identifier, _, guide in self.turns.compiled():
            (self.done if isinstance(guide, Guide) else self.refused).append(identifier)

    def compile_one(self) -> None:
        """Let the thread end one grammar, and look when it wakes the replica."""
        self.compiler.released.release()
        assert self.wakes.acquire(timeout=PATIENCE_S)
        self.look()


@pytest.fixture
def replica() -> Iterator[Replica]:
    made = Replica()
    yield made
    made.compiler.released.release(100)
    made.turns.close()


def test_owners_take_turns_and_the_background_comes_last(replica: Replica) -> None:
    waiting = [request("night", grammar("n0"), is_background=True)]
    waiting += [request("a", grammar(f"a{number}")) for number in range(4)]
    waiting += [request("b", grammar("b0")), request("c", grammar("c0"))]
    for number, one in enumerate(waiting):
        replica.turns.add(f"{number}", one)
    replica.look()
    for _ in waiting:
        replica.compile_one()
    # "a" was there first.
    assert replica.done == ["1", "5", "6", "2", "3", "4", "0"]
    assert replica.turns.requests == []


def test_a_grammar_that_is_kept_waits_for_no_other_one(replica: Replica) -> None:
    replica.turns.add("first", request("b", grammar("known")))
    replica.look()
    replica.compile_one()
    replica.turns.add("slow", request("a", grammar("slow")))
    replica.look()
    until(lambda: len(replica.compiler.begun) == 2)
    replica.turns.add("again", request("b", grammar("known")))
    replica.turns.add("of a second owner", request("c", grammar("known")))
    replica.look()
    assert replica.done == ["first", "again", "of a second owner"]
    assert replica.turns.requests == ["slow"]


def test_a_grammar_of_several_requests_is_compiled_once(replica: Replica) -> None:
    for number, owner in enumerate("aab"):
        replica.turns.add(f"{number}", request(owner, grammar("same")))
    replica.look()
    replica.compile_one()
    assert sorted(replica.done) == ["0", "1", "2"]
    assert len(replica.compiler.begun) == 1


def test_a_request_that_was_cancelled_while_it_waited_is_not_compiled(replica: Replica) -> None:
    for name in "abc":
        replica.turns.add(name, request(name, grammar(name)))
    replica.look()
    replica.turns.cancel("b")
    # Begun, so it is compiled and kept, but nobody gets it.
    replica.turns.cancel("a")
    replica.compile_one()
    replica.compile_one()
    assert replica.done == ["c"]
    assert replica.compiler.begun == [grammar("a"), grammar("c")]


def test_a_grammar_that_cannot_be_compiled_is_refused_to_all_who_wait_for_it(
    replica: Replica,
) -> None:
    bad = grammar_of({"not": {}})
    for name in ("a", "b"):
        replica.turns.add(name, request(name, bad))
    replica.turns.add("c", request("c", grammar("c")))
    replica.look()
    replica.compile_one()
    assert (replica.done, sorted(replica.refused)) == ([], ["a", "b"])
    replica.compile_one()
    assert replica.done == ["c"]
    assert len(replica.compiler.begun) == 2
