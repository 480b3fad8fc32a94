"""Real deliveries of a real service are verified by another implementation, in another language."""

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.processes import Serve, rows_file, start_job
from tests.support.waiting import until
from tuneship.contract.webhooks import SecretRotation, WebhookCreate, WebhookTest
from tuneship.events.signing import new_secret, signed_headers

pytestmark = pytest.mark.slow
SOURCES = Path(__file__).parents[2] / "support" / "fakes" / "receiver_in_node"
FLIPS = 400
PATIENCE_S = 600


@dataclass(frozen=True)
class Node:
    """The receiver of `receiver_in_node/receiver.mjs`, while it runs."""

    http: httpx.Client

    def url(self, name: str) -> str:
        return f"{self.http.base_url}/hook/{name}"

    def put(self, kind: str, name: str, text: str) -> None:
        self.http.put(f"/{kind}/{name}", content=text).raise_for_status()

    def received(self, name: str) -> list[dict[str, Any]]:
        return [one for one in self.http.get("/received").json() if one["name"] == name]

    def kinds(self, name: str) -> set[str]:
        return {one["payload"]["type"] for one in self.received(name)}

    def verify(self, *cases: tuple[str, dict[str, str], bytes]) -> list[bool]:
        body = [
            {"secret": secret, "headers": headers, "payload": base64.b64encode(payload).decode()}
            for secret, headers, payload in cases
        ]
        return self.http.post("/verify", json=body).json()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("node") / "receiver"
    shutil.copytree(SOURCES, folder)
    npm = shutil.which("npm")
    assert npm is not None, (
        "Node.js with npm is needed to verify webhooks with another implementation"
    )
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    subprocess.run([npm, "ci", *options], cwd=folder, check=True, capture_output=True)
    process = subprocess.Popen(
        ["node", "receiver.mjs"],  # noqa: S607 - found beside npm
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    base_url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    with httpx.Client(base_url=base_url, trust_env=False, timeout=PATIENCE_S) as http:
        yield Node(http)
    process.terminate()
    process.wait(PATIENCE_S)
    process.stdout.close()


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.setenv("TUNESHIP_WEBHOOK_ALLOW_CIDRS", "127.0.0.0/8")
    monkeypatch.setenv("TUNESHIP_WEBHOOK_ALLOW_HTTP_HOSTS", "127.0.0.1")
    service = Serve(tmp_path / "data")
    yield service
    service.stop()


def register(serve: Serve, node: Node, name: str) -> tuple[str, str]:
    """Create a webhook that leads to the receiver, and give the receiver its secret. Return the id and the secret."""
    created = serve.client().webhooks.create(WebhookCreate(url=node.url(name), events=["*"]))
    node.put("secret", name, created.secret)
    return created.id, created.secret


def test_only_what_we_signed_is_accepted(node: Node) -> None:
    secret, other = new_secret(), new_secret()
    seconds = int(datetime.now(UTC).timestamp())
    body = json.dumps({"id": "evt_1", "data": {"object": "dataset"}}).encode()
    good = signed_headers([secret], "evt_1", seconds, body)
    both = signed_headers([other, secret], "evt_1", seconds, body)
    late = signed_headers([secret], "evt_1", seconds - 3600, body)
    assert (
        node.verify((secret, good, body), (secret, both, body), (other, both, body)) == [True] * 3
    )
    assert node.verify((other, good, body), (secret, late, body)) == [False] * 2
    spoilt = list(flipped(secret, good, body))
    assert len(spoilt) > 2
    assert node.verify(*spoilt) == [False] * len(spoilt)


def flipped(
    secret: str, headers: dict[str, str], body: bytes
) -> list[tuple[str, dict[str, str], bytes]]:
    """Flip one bit at a time, in each byte of the body, the id, the time and the signature."""
    cases: list[tuple[str, dict[str, str], bytes]] = []
    for number in range(FLIPS):
        bit, changed = 1 << (number // len(body)) % 6, bytearray(body)
        changed[number % len(body)] ^= bit
        cases.append((secret, headers, bytes(changed)))
    for name, value in headers.items():
        first = 3 if name == "webhook-signature" else 0
        # The last two characters hold padding and bits that base64 does not use.
        for position in range(first, len(value) - (2 if first else 0)):
            other = "B" if value[position] == "A" else "A"
            changed_value = other if name != "webhook-timestamp" else str(9 - int(value[position]))
            text = value[:position] + changed_value + value[position + 1 :]
            cases.append((secret, headers | {name: text}, body))
    return cases


def test_a_job_and_its_dataset_are_reported_to_a_receiver(
    serve: Serve, node: Node, tmp_path: Path
) -> None:
    register(serve, node, "story")
    client = serve.client()
    job_id = start_job(client, rows_file(tmp_path / "rows.jsonl", 64), epochs=2)
    until(lambda: "fine_tuning.job.succeeded" in node.kinds("story"))

    # Two deliveries are in flight at a time, so the last one may arrive first.
    def is_all_delivered() -> bool:
        listed = {one.id for one in client.events.list().events}
        return {one["payload"]["id"] for one in node.received("story")} == listed

    until(is_all_delivered)
    received = node.received("story")
    assert all(one["genuine"] for one in received)
    about_job = [one["payload"] for one in received if one["payload"]["data"]["id"] == job_id]
    types = {one["data"]["sequence"]: one["type"].rpartition(".")[2] for one in about_job}
    assert [types[number] for number in sorted(types)] == [
        "queued",
        "started",
        "epoch_completed",
        "epoch_completed",
        "succeeded",
    ]
    assert sorted(types) == [1, 2, 3, 4, 5]
    assert {"dataset.uploaded", "dataset.processed"} <= node.kinds("story")
    listed = {one.id: one.type for one in client.events.list().events}
    assert listed == {one["payload"]["id"]: one["payload"]["type"] for one in received}


def test_a_service_killed_between_event_and_delivery_delivers_after_its_restart(
    serve: Serve, node: Node
) -> None:
    webhook_id, _ = register(serve, node, "killed")
    node.put("mode", "killed", "silence")
    sent = serve.client().webhooks.test(webhook_id, WebhookTest())
    until(lambda: node.received("killed"))
    serve.kill()
    before = len(node.received("killed"))
    node.put("mode", "killed", "answer")
    serve.start()
    until(lambda: len(node.received("killed")) > before)
    assert {one["headers"]["webhook-id"] for one in node.received("killed")} == {sent.event_id}
    assert all(one["genuine"] for one in node.received("killed"))
    client = serve.client()
    until(lambda: client.webhooks.deliveries(webhook_id).deliveries[0].status == "delivered")


def test_while_a_secret_is_rotated_both_are_good(serve: Serve, node: Node) -> None:
    webhook_id, _ = register(serve, node, "rotated")
    client = serve.client()
    new = client.webhooks.rotate_secret(webhook_id, SecretRotation(overlap_hours=1)).secret
    # The receiver first still knows the old secret, then the new one.
    for count, secret in (
        (1, None),
        (2, new),
    ):
        if secret is not None:
            node.put("secret", "rotated", secret)
        client.webhooks.test(webhook_id, WebhookTest(type="deployment.error"))
        until(lambda expected=count: len(node.received("rotated")) >= expected)
    newest = client.webhooks.rotate_secret(webhook_id, SecretRotation(overlap_hours=0)).secret
    client.webhooks.test(webhook_id, WebhookTest())
    until(lambda: len(node.received("rotated")) >= 3)
    # Only the first three count, because a refused delivery is tried again and again.
    received = node.received("rotated")[:3]
    assert [one["genuine"] for one in received] == [True, True, False]
    assert newest != new
    delivery = client.webhooks.deliveries(webhook_id).deliveries[0]
    until(lambda: client.webhooks.deliveries(webhook_id).deliveries[0].response_status == 401)
    assert delivery.type == "fine_tuning.job.succeeded"
