"""OpenAI's agents, over chat completions and over responses, which is their default."""

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner
from asked import MODEL, OPTIONS, QUESTION, report
from openai import AsyncOpenAI

client = AsyncOpenAI()
settings = ModelSettings(temperature=0, max_tokens=OPTIONS["max_tokens"])
answers = []
for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind(model=MODEL, openai_client=client)
    agent = Agent(name="coder", model=model, model_settings=settings)
    answers.append(Runner.run_sync(agent, QUESTION).final_output)
report(*answers)
