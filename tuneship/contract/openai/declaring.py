"""Declares the operations below `/openai/v1`, which the clients of OpenAI call instead of tuneship's own client.

They are kept apart from `DECLARED`: tuneship's client, command and document do not show them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from tuneship.contract.declaring.operation import Example, Method, Operation

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "/openai/v1/"
# Every operation, in the order of declaration.
OPENAI: list["OpenAIOperation[..., Any]"] = []


@dataclass(frozen=True)
class OpenAIOperation(Operation[P, R]):
    """An operation of OpenAI's API. Its creates answer 200, so it says itself whether it changes something."""

    changes: bool = False

    @property
    def is_change(self) -> bool:
        """Whether it creates, changes or deletes something."""
        return self.changes


def openai_operation(
    method: Method,
    path: str,
    *,
    scope: str,
    changes: bool = False,
    example: Example,
) -> Callable[[Callable[P, R]], OpenAIOperation[P, R]]:
    """Declare the decorated signature as an operation of OpenAI's API; `path` begins behind `/openai/v1/`."""

    def declare(declaration: Callable[P, R]) -> OpenAIOperation[P, R]:
        declared = OpenAIOperation(
            method=method,
            path=PREFIX + path,
            scope=scope,
            status=200,
            errors=(),
            headers=(),
            example=example,
            declaration=declaration,
            changes=changes,
        )
        OPENAI.append(declared)
        return declared

    return declare
