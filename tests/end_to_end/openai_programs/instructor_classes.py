"""instructor has a class of the program filled."""

from typing import Literal

import instructor
import openai
from asked import MODEL, OPTIONS, QUESTION, report
from pydantic import BaseModel, ConfigDict


class Diagnosis(BaseModel):
    """The class to fill, and nothing else: a schema that allows more gets more."""

    model_config = ConfigDict(extra="forbid")
    is_chronic: bool
    severity: Literal["mild", "severe"]


messages = [{"role": "user", "content": QUESTION}]
client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
found = client.chat.completions.create(
    model=MODEL, response_model=Diagnosis, max_retries=0, messages=messages
)
plain = openai.OpenAI().chat.completions.create(model=MODEL, messages=messages, **OPTIONS)
report(plain.choices[0].message.content, guided=found.model_dump())
