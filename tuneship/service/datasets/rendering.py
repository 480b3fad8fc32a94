"""Whether the chat template of a base model takes an example. Next: `reading.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tuneship.contract.lines.dataset_lines import Message
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.training.examples.conversation_rows import conversation_rows


def check_rendering(
    template: PromptTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Render an example as training does. Raises `ExampleProblem`."""
    try:
        conversation_rows(messages, template, tools)
    except TemplateFailed as failure:
        raise ExampleProblem("template_refuses", None, str(failure)) from None
