"""LlamaIndex's engine tunes a model, and `OpenAILike` asks it; its own check of a file would download a tokenizer."""

import json
import time

from asked import BASE_URL, KEY, MODEL, OPTIONS, QUESTION
from llama_index.core.llms import ChatMessage
from llama_index.finetuning import OpenAIFinetuneEngine
from llama_index.llms.openai_like import OpenAILike

engine = OpenAIFinetuneEngine(MODEL, "colours.jsonl", validate_json=False)
engine.finetune()
while (job := engine.get_current_job()).status not in ("succeeded", "failed", "cancelled"):
    time.sleep(0.5)
tuned = OpenAILike(
    model=job.fine_tuned_model, api_base=BASE_URL, api_key=KEY, is_chat_model=True, **OPTIONS
)
answer = tuned.chat([ChatMessage(role="user", content=QUESTION)])
print(json.dumps({"status": job.status, "model": answer.raw.model}))  # noqa: T201 - read by the test
