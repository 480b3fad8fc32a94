"""The commands of the API call a real service over sockets, and say in one line what is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.in_process import LINES, Service, jsonl
from tests.support.whole_api import BODIES, Own
from tuneship.cli.declared import DeclaredVerb, resources, verbs_of
from tuneship.cli.examples import command_line
from tuneship.cli.main import app
from tuneship.contract.operation import DECLARED

VERBS = {
    verb.operation.name: verb for group in resources() for verb in verbs_of(group).values()
}  # fmt: skip
# What is removed is removed at last.
ORDER = sorted(DECLARED, key=lambda one: (one.method == "DELETE", one.name == "delete_dataset"))


class Place:
    """A service with one resource of each kind, and the command line of a user of it."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service = service
        self.file = folder / "train.jsonl"
        self.file.write_bytes(jsonl(*LINES))
        service.names["receiver.test"] = ["9.9.9.9"]
        self.model = service.model()
        self.deployment = service.deployment("serving", model_name=service.model())
        hook = {"url": "https://receiver.test/hook", "events": ["*"]}
        webhook = service.call("POST", "/v1/webhooks", json=hook).json()["id"]
        event = service.call("POST", f"/v1/webhooks/{webhook}/test", json={}).json()["event_id"]
        self.own = Own(service.dataset(), service.dataset(), self.deployment, self.model, "made")
        self.ids = {
            "dataset_id": service.dataset(),
            "job_id": service.job(),
            "model_id": self.model,
            "deployment_id": self.deployment,
            "webhook_id": webhook,
            "event_id": event,
            "endpoint_id": service.endpoint("plain", self.deployment),
        }
        self.canary = service.canary("split", {self.deployment: 100})
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        self.environment = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def run(self, *words: str, stdin: str | None = None, **environment: str) -> Result:
        return CliRunner().invoke(
            app, list(words), input=stdin, env={**self.environment, **environment}
        )

    def json(self, *words: str, stdin: str | None = None) -> Any:
        done = self.run(*words, "--json", stdin=stdin)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def words(self, verb: DeclaredVerb, body: Mapping[str, Any] | None = None) -> list[str]:
        ids = self.ids | ({"endpoint_id": self.canary} if verb.group == "canary" else {})
        made = BODIES[verb.operation.name](self.own) if verb.operation.body_parameter else {}
        return command_line(verb, ids, made if body is None else body, str(self.file))

    def process(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        """Start the command as a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "tuneship.cli.main", *words],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("cli")
    with Service(folder / "data", concurrent_jobs=2) as service:
        yield Place(service, folder)


@pytest.mark.parametrize("operation", ORDER, ids=lambda one: one.name)
def test_every_declared_operation_is_called(place: Place, operation: Any) -> None:
    words = place.words(VERBS[operation.name])
    # The deployment is in use, and the models are what it serves.
    if operation.name == "delete_deployment":
        words.append("--force")
    reply = place.json(*words)
    operation.reply_type.validate_python(reply)
