"""Any request to chat is answered in OpenAI's form, and a refusal holds nothing of what was sent."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import bare_headers
from tests.support.service.in_process import Service
from tuneship.contract.openai.chat import ChatCompletionCreate

# Not the form of a field: names of that form are said, so that a program learns which one is refused.
MARK = "qzx 7731"
FIELDS = sorted(
    {
        *ChatCompletionCreate.model_fields,
        *ChatCompletionCreate.neutral,
        *ChatCompletionCreate.unsupported,
    }
)
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-3, 3) | st.just(MARK)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", MARK]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
BODIES = st.dictionaries(st.sampled_from([*FIELDS, MARK]), VALUES, max_size=5)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(fields=BODIES, is_whole=st.booleans())
def test_an_answer_or_a_fault_of_the_known_form(
    answering: Service, fields: dict[str, Any], is_whole: bool
) -> None:
    if is_whole:
        fields = {
            "model": ENDPOINT,
            "messages": [{"role": "user", "content": "a"}],
            **fields,
        }
    answer = answering.call(
        "POST",
        "/openai/v1/chat/completions",
        None,
        content=json.dumps(fields).encode(),
        headers={**bare_headers(answering), "Content-Type": "application/json"},
    )
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) - {"details"} == {"message", "type", "param", "code"}
        assert error["code"]
        assert answer.headers["x-should-retry"] == "false"
        assert MARK not in answer.text
