"""LangChain asks: whole, as a stream, several at once, for its own class; and knows a prompt that is too long."""

from asked import DIAGNOSIS, MODEL, OPTIONS, QUESTION, TOO_LONG, report
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

chat = ChatOpenAI(model=MODEL, **OPTIONS)
answers = [
    chat.invoke(QUESTION).content,
    "".join(str(chunk.content) for chunk in chat.stream(QUESTION)),
    *(one.content for one in chat.batch([QUESTION] * 3)),
    ChatOpenAI(model=MODEL, use_responses_api=True, **OPTIONS).invoke(QUESTION).text,
]
schema = {"title": "Diagnosis", "description": "A diagnosis.", **DIAGNOSIS}
guided = ChatOpenAI(model=MODEL).with_structured_output(schema, method="json_schema")
vectors = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_documents(
    ["a", "b"]
)
assert len(vectors) == 2
try:
    chat.invoke(TOO_LONG)
except ContextOverflowError:
    pass
else:
    raise AssertionError("a prompt that is too long was not recognised")
report(*answers, guided=guided.invoke(QUESTION))
