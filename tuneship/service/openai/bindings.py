"""The handlers of OpenAI's operations by name, apart from those of the main API."""

from typing import ParamSpec, TypeVar

from tuneship.contract.openai.declaring import OpenAIOperation
from tuneship.service.context.bindings import Bind, BoundOperation, serves

P = ParamSpec("P")
R = TypeVar("R")

OPENAI_SERVED: dict[str, BoundOperation] = {}


def serves_openai(operation: OpenAIOperation[P, R], *, is_long: bool = False) -> Bind[P, R]:
    """Bind a handler to an operation of OpenAI's API, as `serves` does for the main API."""
    return serves(operation, is_long=is_long, served=OPENAI_SERVED)
