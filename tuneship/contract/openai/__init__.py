"""OpenAI's API as this service offers it: the operations below `/openai/v1`, with models of their own."""
