"""Compiles the grammars of waiting requests while the engine goes on; owners take turns, as for slots.

One thread compiles one grammar at a time. A request whose grammar is kept does not wait for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from tuneship.serving.sampling.guides import GrammarCompiler, GrammarRefused, Guide
from tuneship.serving.sequence import GenerateRequest


class _GrammarTurn(NamedTuple):
    """The requests that share a turn: those of an owner, or those in an owner's background."""

    is_background: bool
    owner: str


class GrammarTurns:
    """Requests that wait for their grammars. Used by one thread."""

    def __init__(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        """`wake` is called, on another thread, when `compiled` has new results."""
        self._compiler = compiler
        self._wake = wake
        self._thread = ThreadPoolExecutor(1, "grammars")
        # By id, in the order of their turns.
        self._waiting: OrderedDict[_GrammarTurn, dict[str, GenerateRequest]] = OrderedDict()
        self._compiling: tuple[GenerateRequest, Future[Guide]] | None = None

    @property
    def requests(self) -> list[str]:
        """Ids of the requests that wait."""
        return [identifier for requests in self._waiting.values() for identifier in requests]

    def add(self, identifier: str, request: GenerateRequest) -> None:
        """Let a request with a grammar wait."""
        turn = _GrammarTurn(request.is_background, request.owner)
        self._waiting.setdefault(turn, {})[identifier] = request

    def cancel(self, identifier: str) -> None:
        """Stop waiting for a request's grammar. It is not compiled, unless compilation has begun."""
        for turn, requests in list(self._waiting.items()):
            requests.pop(identifier, None)
            if not requests:
                del self._waiting[turn]

    def compiled(self) -> Iterator[tuple[str, GenerateRequest, Guide | GrammarRefused]]:
        """Yield the requests that wait no more, each with its guide or why it has none; then compile the next."""
        errors: dict[tuple[str, tuple[int, ...]], GrammarRefused] = {}
        if self._compiling is not None and self._compiling[1].done():
            request, future = self._compiling
            self._compiling = None
            try:
                future.result()
            except GrammarRefused as error:
                errors[_key(request)] = error
        for requests in list(self._waiting.values()):
            for identifier, request in list(requests.items()):
                key = _key(request)
                if guide := self._compiler.kept(*key) or errors.get(key):
                    self.cancel(identifier)
                    yield identifier, request, guide
        if self._compiling is None and self._waiting:
            # The first turn that is not in the background; the first of all if there is none.
            turn = min(self._waiting, key=lambda one: one.is_background)
            self._waiting.move_to_end(turn)
            request = next(iter(self._waiting[turn].values()))
            future = self._thread.submit(self._compiler.guide, *_key(request))
            self._compiling = (request, future)
            future.add_done_callback(lambda _: self._wake())

    def close(self) -> None:
        """Wait for the thread. Nothing is compiled after that."""
        self._thread.shutdown(cancel_futures=True)


def _key(request: GenerateRequest) -> tuple[str, tuple[int, ...]]:
    return request.grammar or "", request.stop_tokens
