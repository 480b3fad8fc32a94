"""litellm asks as for any provider, reads files and jobs, and knows a prompt that is too long."""

import litellm
from asked import DIAGNOSIS, MODEL, OPTIONS, QUESTION, TOO_LONG, report

model = f"openai/{MODEL}"
messages = [{"role": "user", "content": QUESTION}]
whole = litellm.completion(model=model, messages=messages, **OPTIONS)
chunks = litellm.completion(model=model, messages=messages, stream=True, **OPTIONS)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
form = {"type": "json_schema", "json_schema": {"name": "diagnosis", "schema": DIAGNOSIS}}
guided = litellm.completion(model=model, messages=messages, response_format=form)
assert len(litellm.embedding(model=model, input=["a", "b"]).data) == 2
assert list(litellm.list_fine_tuning_jobs(custom_llm_provider="openai").data) == []
try:
    litellm.completion(model=model, messages=[{"role": "user", "content": TOO_LONG}])
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt that is too long was not recognised")
report(whole.choices[0].message.content, streamed, guided=guided.choices[0].message.content)
