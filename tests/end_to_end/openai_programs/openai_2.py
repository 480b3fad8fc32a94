"""The second major of OpenAI's client, which LlamaIndex pins: answers, a stream, a list, classes of errors."""

import io
import json

import openai
from asked import DIAGNOSIS, MODEL, OPTIONS, QUESTION, report

client = openai.OpenAI()
messages = [{"role": "user", "content": QUESTION}]
whole = client.chat.completions.create(model=MODEL, messages=messages, **OPTIONS)
chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True, **OPTIONS)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
response = client.responses.create(
    model=MODEL, input=QUESTION, temperature=0, max_output_tokens=OPTIONS["max_tokens"]
)
form = {"type": "json_schema", "json_schema": {"name": "diagnosis", "schema": DIAGNOSIS}}
guided = client.chat.completions.create(model=MODEL, messages=messages, response_format=form)
refused = []
for fields in ({"model": "gpt-nobody"}, {"temperature": 9}):
    try:
        client.chat.completions.create(**{"model": MODEL, "messages": messages, **fields})
    except openai.APIStatusError as error:
        refused.append([type(error).__name__, error.code])
lines = [{"prompt": f"colour {number}", "completion": "red"} for number in range(4)]
content = "".join(json.dumps(line) + "\n" for line in lines).encode()
file = client.files.create(file=("colours.jsonl", io.BytesIO(content)), purpose="fine-tune")
assert file.id in [one.id for one in client.files.list()]
assert MODEL in [one.id for one in client.models.list()]
assert client.files.delete(file.id).deleted
assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
assert refused == [["NotFoundError", "model_not_found"], ["BadRequestError", "invalid_value"]]
report(
    whole.choices[0].message.content,
    streamed,
    response.output_text,
    guided=guided.choices[0].message.content,
)
