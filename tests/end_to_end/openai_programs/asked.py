"""The question of every program, and the report of its answers."""

import json
import os
from typing import Any

BASE_URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
MODEL, QUESTION = os.environ["MODEL"], os.environ["QUESTION"]
# The schema of answers in a form.
DIAGNOSIS: Any = json.loads(os.environ["DIAGNOSIS"])
OPTIONS: Any = {"temperature": 0, "max_tokens": 12}
TOO_LONG = "cataract " * 5_000


def report(*answers: Any, guided: Any = None) -> None:
    """Print what was answered to the question, and what was answered in the form of the schema."""
    print(json.dumps({"answers": answers, "guided": guided}))  # noqa: T201 - read by the test
