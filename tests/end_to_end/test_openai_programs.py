"""Programs that were written for OpenAI, each in an environment of its own, call the service.

They all ask one question, whole, as a stream and over each API that they know. The answer must be the one that the main
API gives; where they send a schema, it must fit. `openai_programs/` has what runs in these environments.
"""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.openai.openai_programs import MODEL, QUESTION, Asked, environment, npm_install
from tests.support.repeats import variants

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROGRAMS = Path(__file__).with_name("openai_programs")
PYTHON = {
    "openai_2.py": ("openai==2.54.0",),
    "langchain_chat.py": ("langchain-openai==1.7.3",),
    "litellm_calls.py": ("litellm==1.106.2",),
    "instructor_classes.py": ("instructor==1.17.0",),
    "agents_sdk.py": ("openai-agents==0.20.0",),
    "llamaindex_like.py": ("llama-index-llms-openai-like==0.8.1",),
}
NODE = {
    "openai-node 7": ("openai_node.mjs", "openai@7.57.0"),
    "AI SDK 7": (
        "ai_sdk.mjs",
        *("ai@7.0.173", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3"),
    ),
    "openai-node 6": ("openai_node.mjs", "openai@6.49.0"),
    "AI SDK 6": (
        "ai_sdk.mjs",
        *("ai@6.0.326", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2"),
    ),
}


@pytest.mark.parametrize("program", variants(PYTHON, each_commit=2))
def test_a_python_program_gets_the_models_answers(
    asked: Asked, tmp_path: Path, program: str
) -> None:
    commands = environment(tmp_path / "env", *PYTHON[program])
    asked.check(asked.run(commands / "python", PROGRAMS / program))


def test_the_last_openai_command_with_subcommands_works(asked: Asked, tmp_path: Path) -> None:
    command = environment(tmp_path / "env", "openai==2.34.0") / "openai"
    assert MODEL in asked.run(command, "api", "models.list")
    chat = ("api", "chat.completions.create", "-m", MODEL, "-g", "user", QUESTION)
    for more in ((), ("--stream",)):
        printed = asked.run(command, *chat, "-t", "0", "-M", "12", *more)
        assert printed.strip() == asked.answer.strip()
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a", "completion": "red"}\n' * 8)
    printed = asked.run(command, "api", "files.create", "-f", str(lines), "-p", "fine-tune")
    file_id = json.loads(printed)["id"]
    job = ("api", "fine_tuning.jobs.create", "-m", MODEL, "-F", file_id)
    made = json.loads(asked.run(command, *job))["id"]
    assert made in asked.run(command, "api", "fine_tuning.jobs.list")


def test_llm_answers_at_once_and_as_a_stream(asked: Asked, tmp_path: Path) -> None:
    command = environment(tmp_path / "env", "llm==0.32.1") / "llm"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: mine\n  model_name: {MODEL}\n  api_base: {asked.base_url}\n"
        "  api_key_name: mine\n"
    )
    (tmp_path / "keys.json").write_text(json.dumps({"mine": asked.variables["OPENAI_API_KEY"]}))
    options = ("-o", "temperature", "0", "-o", "max_tokens", "12")
    for more in (("--no-stream",), ()):
        printed = asked.run(
            *(command, "-m", "mine", *options, *more, QUESTION), LLM_USER_PATH=str(tmp_path)
        )
        assert printed.strip() == asked.answer.strip()


@pytest.mark.parametrize("program", variants(NODE))
def test_a_program_of_node_gets_the_models_answers(
    asked: Asked, node_22: Path, tmp_path: Path, program: str
) -> None:
    script, *packages = NODE[program]
    variables = npm_install(tmp_path, node_22, *packages)
    shutil.copy(PROGRAMS / script, tmp_path)
    asked.check(asked.run("node", script, cwd=tmp_path, **variables))
