"""LlamaIndex asks through `OpenAILike`: its own `OpenAI` refuses names of models that it does not know."""

from asked import BASE_URL, KEY, MODEL, OPTIONS, QUESTION, report
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, context_window=512, **OPTIONS
)
messages = [ChatMessage(role="user", content=QUESTION)]
report(
    model.chat(messages).message.content,
    "".join(part.delta or "" for part in model.stream_chat(messages)),
    model.complete(QUESTION).text,
)
