"""Whether the chat template of a base model takes an example. Next: `reading.py`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tuneship.contract.dataset_lines import Message
from tuneship.contract.example_problem import ExampleProblem
from tuneship.template import PromptTemplate, TemplateFailed


def check_rendering(
    template: PromptTemplate, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Render an example as training does: whole, and up to each turn that is learnt. Raises `ExampleProblem`."""
    if any("tool_calls" in message for message in messages):
        template = template.with_tools  # also for the turns before the first call
    try:
        template.render(messages, add_generation_prompt=False, tools=tools)
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("weight", 1) != 0:
                template.render(messages[:number], add_generation_prompt=True, tools=tools)
    except TemplateFailed as failure:
        raise ExampleProblem("template_refuses", None, str(failure)) from None
