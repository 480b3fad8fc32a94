"""A request of OpenAI's clients as a run of the main API."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tuneship.service.answers.streaming import Stream
from tuneship.service.generation.routed_run import RoutedRun

R = TypeVar("R")


@dataclass(frozen=True)
class OpenAIRun(Generic[R]):
    """A run that has not begun."""

    run: RoutedRun
    # Returns OpenAI's answer, after the run has answered.
    reply: Callable[[], R]
    # Runs and streams; None where one whole answer is wanted.
    stream: Callable[[], Awaitable[Stream]] | None = None

    async def answer(self) -> R | Stream:
        """Run, and return OpenAI's answer."""
        return await (self.run.answer_as(self.reply) if self.stream is None else self.stream())
