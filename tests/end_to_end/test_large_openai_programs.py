"""promptfoo, Open WebUI and LlamaIndex's engine, which take gigabytes, call the service over OpenAI's API."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.end_to_end.conftest import ROOT
from tests.support.openai.openai_programs import MODEL, QUESTION, Asked, environment, npm_install
from tests.support.waiting import free_port, until

pytestmark = [pytest.mark.soak, pytest.mark.long]

PROGRAMS = Path(__file__).with_name("openai_programs")
# A package that is no longer maintained: it imports a name that the next mistralai lacks.
LLAMA_INDEX = ("llama-index-finetuning==0.4.2", "llama-index-llms-openai-like", "mistralai<2")
PROMPTFOO, OPEN_WEBUI = "promptfoo@0.123", "open-webui==0.12.4"
READY_WITHIN_S = 600.0


def test_promptfoo_evaluates_over_three_apis(asked: Asked, node_22: Path, tmp_path: Path) -> None:
    variables = npm_install(tmp_path, node_22, PROMPTFOO)
    limits = {"chat": "max_tokens", "responses": "max_output_tokens", "completion": "max_tokens"}
    providers = [
        {"id": f"openai:{kind}:{MODEL}", "config": {"temperature": 0, limit: 12}}
        for kind, limit in limits.items()
    ]
    config = {
        "prompts": ["{{question}}"],
        "providers": providers,
        "tests": [{"vars": {"question": QUESTION}}],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    quiet = {"PROMPTFOO_DISABLE_TELEMETRY": "1", "PROMPTFOO_DISABLE_UPDATE": "1"}
    command = ("node", "node_modules/promptfoo/dist/src/entrypoint.js", "eval", "--no-cache")
    asked.run(
        *(*command, "-c", "config.json", "-o", "found.json"),
        cwd=tmp_path,
        PROMPTFOO_CONFIG_DIR=str(tmp_path / "promptfoo"),
        **variables,
        **quiet,
    )
    results = json.loads((tmp_path / "found.json").read_text())["results"]["results"]
    found = {one["provider"]["id"].split(":")[1]: one["response"] for one in results}
    assert found.keys() == limits.keys()
    answers = {found[kind]["output"].strip() for kind in ("chat", "responses")}
    assert answers == {asked.answer.strip()}
    assert found["completion"]["output"].strip()  # it continues the question without a template
    assert all(one["tokenUsage"]["total"] > 0 for one in found.values())


def pinned_torch() -> str:
    """The version that keeps pip from libraries for GPUs."""
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = [line for line in pinned if line.startswith("torch==")]
    return torch


def test_llamaindex_tunes_a_model_and_asks_it(asked: Asked, tmp_path: Path) -> None:
    commands = environment(tmp_path / "env", *LLAMA_INDEX, pinned_torch())
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "red"}]
    (tmp_path / "colours.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    script = PROGRAMS / "llamaindex_engine.py"
    found = json.loads(asked.run(commands / "python", script, cwd=tmp_path).splitlines()[-1])
    assert found["status"] == "succeeded"
    assert found["model"].startswith(f"ft:{MODEL}:")


@contextmanager
def open_webui(asked: Asked, folder: Path) -> Iterator[httpx.Client]:
    """Install and start Open WebUI, and sign in."""
    commands = environment(folder / "env", OPEN_WEBUI, pinned_torch())
    variables = asked.variables | {
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "only here",
        "OPENAI_API_BASE_URLS": asked.base_url,
        "OPENAI_API_KEYS": asked.variables["OPENAI_API_KEY"],
        "ENABLE_OLLAMA_API": "False",
        "RAG_EMBEDDING_ENGINE": "openai",  # no model is downloaded
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
    }
    port = free_port()
    command = [commands / "open-webui", "serve", "--host", "127.0.0.1", "--port", str(port)]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
    ):
        try:
            until(lambda: _answers(client, process), READY_WITHIN_S)
            nobody = {"email": "admin@localhost", "password": "admin"}
            token = client.post("/api/v1/auths/signin", json=nobody).json()["token"]
            client.headers["Authorization"] = f"Bearer {token}"
            yield client
        finally:
            process.kill()


def _answers(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_open_webui_lists_the_models_and_chats(asked: Asked, tmp_path: Path) -> None:
    with open_webui(asked, tmp_path) as client:
        listed = client.get("/api/models").json()["data"]
        assert MODEL in [one["id"] for one in listed]
        messages = [{"role": "user", "content": QUESTION}]
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": messages,
            "temperature": 0,
            "max_tokens": 12,
        }
        path = "/api/chat/completions"
        whole = client.post(path, json={**body, "stream": False}).json()
        assert whole["choices"][0]["message"]["content"] == asked.answer
        lines = client.post(path, json={**body, "stream": True}).text.splitlines()
        chunks = [line.removeprefix("data: ") for line in lines if line]
        assert chunks.pop() == "[DONE]"
        deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content") or "" for delta in deltas) == asked.answer
