"""A fake service on loopback for rollouts: deployments, metrics, canary endpoints, leases and generation.

It follows the contract that the flow relies on (`tuneship/contract/endpoints.py`, `metrics.py`), with scripted traffic
instead of models. It can lose answers, refuse requests, or lack all extensions of the API. Its clock advances by one
bucket per look, or with real time.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

EPOCH = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
BUCKET = timedelta(minutes=1)
BASELINE, CANDIDATE, ENDPOINT = "dep_baseline", "dep_candidate", "cep_shop"


@dataclass
class Arm:
    """The scripted behaviour of a deployment; its error share depends on the bucket and on the candidate's weight."""

    error_share: Callable[[int, int], float] = lambda _bucket, _weight: 0.003
    percentiles_ms: tuple[float, float, float] = (400.0, 900.0, 1500.0)
    empty_share: float = 0.0
    status: str = "running"
    replicas: int = 1
    deleted_at_tick: int | None = None
    owed: dict[str, float] = field(default_factory=dict)

    def rounded(self, kind: str, amount: float) -> int:
        """Round down, and add the remainder to the next amount of this kind."""
        total = self.owed.get(kind, 0.0) + amount
        self.owed[kind] = total - int(total + 1e-9)
        return int(total + 1e-9)


@dataclass(frozen=True)
class Tally:
    """The traffic of one deployment in one bucket."""

    requests: int
    errors: int
    empty: int
    percentiles_ms: tuple[float, float, float]


@dataclass(frozen=True)
class Patch:
    """A request to change the split, and its answer's status."""

    tick: int
    weights: dict[str, int]
    if_match: str | None
    idempotency_key: str | None
    lease: dict[str, Any] | None
    status: int


Answer = tuple[int, dict[str, Any]]


class Refusal(Exception):
    """An answer that refuses a request."""

    def __init__(
        self, status: int, code: str, message: str = "refused", served_by: str | None = None
    ) -> None:
        """Build the body, which has the same shape for every refusal."""
        super().__init__(message)
        self.headers = {"X-Deployment-ID": served_by} if served_by else {}
        body = {"code": code, "message": message, "type": code, "param": None, "details": []}
        self.answer: Answer = (status, {"error": body})


class LostAnswer(Exception):
    """Raised after a change was applied, to break the connection before the answer."""


class FakeService:
    """The fake with its state, its script and a log of requests; it is served inside a `with` block, at `url`."""

    def __init__(
        self,
        candidate: Arm | None = None,
        baseline: Arm | None = None,
        *,
        requests_per_bucket: int = 600,
        extensions: bool = True,
        seconds_per_bucket: float | None = None,
    ) -> None:
        """Without `seconds_per_bucket`, each read of the baseline's status finishes one bucket."""
        self.arms = {BASELINE: baseline or Arm(), CANDIDATE: candidate or Arm()}
        self.requests_per_bucket = requests_per_bucket
        self.extensions = extensions
        self.seconds_per_bucket = seconds_per_bucket
        self.endpoint: dict[str, Any] | None = None
        self.lease_ends: float | None = None
        self.buckets: list[dict[str, Tally]] = []
        self.patches: list[Patch] = []
        self.deleted: list[str] = []
        self.created = 0
        self.generations: list[str] = []
        # The routing key of each request to generate.
        self.routing_keys: list[str | None] = []
        # Whether a request for a stream is answered with a stream.
        self.streams = False
        # The point at which the connection of a generation breaks: "before it" or "after the head".
        self.breaks_off = ""
        # Functions to call when so many buckets are finished.
        self.at_tick: dict[int, Callable[[], object]] = {}
        # A function to call once, just before the next PATCH is handled.
        self.before_patch: Callable[[], object] | None = None
        self.renewed_for = 0
        # By deployment: a number of reads, and a function to call after them.
        self.after_reads: dict[str, tuple[int, Callable[[], object]]] = {}
        self.refuse_generation: Refusal | None = None
        # Times (`time.monotonic()`) of refused generations.
        self.refused_at: list[float] = []
        # An event for which generations wait; `waiting` counts them.
        self.generation_gate: threading.Event | None = None
        self.waiting = 0
        self.metrics_down: Callable[[int], bool] = lambda _tick: False
        # A function that changes a deployment's metrics before they are answered.
        self.spoil: Callable[[str, dict[str, Any]], object] = lambda _name, _metrics: None
        # By deployment without requests: how its metrics show that, as "zeros", "empty" or "nulls".
        self.silent: dict[str, str] = {}
        # One action per PATCH: "lose" the answer, "fail" before applying it, apply it "twice", or "ok".
        self.patch_script: list[str] = []
        self._lock = threading.RLock()
        self._started = time.monotonic()
        self._server: ThreadingHTTPServer | None = None

    # -- serving --

    def __enter__(self) -> Self:
        """Serve on a free port."""
        fake = self

        class Handler(_Handler):
            service = fake

        self._server = _Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def url(self) -> str:
        """The base address of the fake."""
        if self._server is None:
            raise RuntimeError("not served")
        return f"http://127.0.0.1:{self._server.server_port}"

    # -- time and traffic --

    @property
    def weights(self) -> dict[str, int]:
        """The current split, after expired leases have been applied."""
        with self._lock:
            self._catch_up()
            return self._weights()

    @property
    def ticks(self) -> int:
        """The number of finished buckets."""
        return len(self.buckets)

    @property
    def now(self) -> datetime:
        """The time on the fake's clock."""
        return EPOCH + self.ticks * BUCKET

    def tick(self, count: int = 1) -> None:
        """Finish so many buckets with the current split."""
        with self._lock:
            for _ in range(count):
                self._finish_bucket()

    def _weights(self) -> dict[str, int]:
        members = self.endpoint["deployments"] if self.endpoint else []
        return {one["id"]: one["traffic_percentage"] for one in members}

    def _catch_up(self) -> None:
        self._expire_lease()
        if self.seconds_per_bucket is None:
            return
        due = int((time.monotonic() - self._started) / self.seconds_per_bucket)
        while len(self.buckets) < due:
            self._finish_bucket()

    def _expire_lease(self) -> None:
        if self.endpoint and self.lease_ends is not None and time.monotonic() > self.lease_ends:
            self.revert()

    def revert(self) -> None:
        """Return to the fallback of the lease, as the service does when a lease expires."""
        with self._lock:
            if self.endpoint and self.endpoint["lease"]:
                lease, rollout_id = self.endpoint["lease"], self.endpoint["rollout_id"]
                self._change(lease["fallback"], None, rollout_id)

    def _finish_bucket(self) -> None:
        weights = self._weights() or {BASELINE: 100}
        candidate_weight = weights.get(CANDIDATE, 0)
        number = len(self.buckets)
        tallies: dict[str, Tally] = {}
        for name, arm in self.arms.items():
            count = arm.rounded("requests", self.requests_per_bucket * weights.get(name, 0) / 100)
            count = 0 if name in self.silent else count
            errors = arm.rounded("errors", count * arm.error_share(number, candidate_weight))
            empty = arm.rounded("empty", count * arm.empty_share)
            tallies[name] = Tally(count, errors, empty, arm.percentiles_ms)
        self.buckets.append(tallies)
        self.at_tick.pop(self.ticks, lambda: None)()

    # -- operations --

    def answer(
        self, method: str, path: str, query: dict[str, str], body: Any, headers: Mapping[str, str]
    ) -> Answer:
        """Answer a request."""
        if self.generation_gate is not None and path.endswith("/generate"):
            with self._lock:
                self.waiting += 1
            self.generation_gate.wait(120)
        with self._lock:
            self._catch_up()
            parts = path.removeprefix("/v1/").split("/")
            resource, rest = parts[0], parts[1:]
            if resource == "models" and not rest:
                page = {"total": 0, "limit": 1, "offset": 0, "next_offset": None}
                return 200, {"models": [], "pagination": page}
            if resource == "deployments" and method != "POST":
                return self._deployments(method, rest, query)
            if resource == "canary-endpoints":
                return self._endpoints(method, rest, query, body, headers)
            if resource == "endpoints" and method == "POST" and rest[1:] == ["generate"]:
                self.routing_keys.append(headers.get("X-Routing-Key"))
                return self._generate(body)
            return self.other(method, parts, query, body)

    def other(self, method: str, parts: list[str], query: dict[str, str], body: Any) -> Answer:
        """Answer requests that this class does not know; subclasses add routes here."""
        raise Refusal(404, "resource_not_found", "no such route")

    def _deployments(self, method: str, rest: list[str], query: dict[str, str]) -> Answer:
        name = rest[0]
        arm = self.arms.get(name)
        if arm is None or name in self.deleted:
            raise Refusal(404, "resource_not_found", f"no deployment {name}")
        if rest[1:] == ["metrics"]:
            return self._metrics(name, query)
        if method == "DELETE":
            if self._weights().get(name, 0) > 0 or self._is_fallback(name):
                raise Refusal(409, "deployment_error", "an endpoint sends it traffic")
            self.deleted.append(name)
            return 200, {"id": name, "status": "deleting"}
        left, happens = self.after_reads.pop(name, (0, lambda: None))
        if left == 1:
            happens()
        elif left:
            self.after_reads[name] = (left - 1, happens)
        if name == BASELINE and self.seconds_per_bucket is None and self.endpoint:
            self._finish_bucket()
        return 200, self.shown(name, arm)

    def _is_fallback(self, name: str) -> bool:
        lease = self.endpoint["lease"] if self.endpoint else None
        return bool(lease) and any(one["id"] == name for one in lease["fallback"])

    def shown(self, name: str, arm: Arm) -> dict[str, Any]:
        """Describe a deployment in the format of the API."""
        return {
            "id": name,
            "model_name": "tiny",
            "deployment_name": name,
            "status": arm.status,
            "current_replicas": arm.replicas,
            "created_at": as_text(EPOCH),
            "updated_at": as_text(EPOCH),
        }

    def _metrics(self, name: str, query: dict[str, str]) -> Answer:
        if self.metrics_down(self.ticks):
            raise Refusal(503, "internal_error", "metrics are down")
        start = datetime.fromisoformat(query.get("start_time", as_text(EPOCH)))
        first = max(0, -(-(start - EPOCH) // BUCKET))
        nothing = Tally(0, 0, 0, self.arms[name].percentiles_ms)  # for buckets before it was made
        rows = [
            (number, self.buckets[number].get(name, nothing)) for number in range(first, self.ticks)
        ]
        metrics = _series(rows, self.extensions, self.silent.get(name))
        self.spoil(name, metrics)
        return 200, {
            "deployment_id": name,
            "start_time": as_text(start),
            "end_time": as_text(self.now),
            "interval": query.get("interval", "1m"),
            "metrics": metrics,
            "summary": {},
        }

    def _endpoints(
        self,
        method: str,
        rest: list[str],
        query: dict[str, str],
        body: Any,
        headers: Mapping[str, str],
    ) -> Answer:
        if method == "PATCH" and self.endpoint:
            return self._patch(body, headers)
        if method == "POST" and not rest:
            return self._create(body)
        if not self.extensions:
            raise Refusal(405, "invalid_request_error", "no such method")
        if method == "GET" and not rest:
            known = self.endpoint and query.get("name") in (None, self.endpoint["name"])
            page = {"total": int(bool(known)), "limit": 20, "offset": 0, "next_offset": None}
            return 200, {
                "canary_endpoints": [self.endpoint] if known else [],
                "pagination": page,
            }
        if not self.endpoint or rest[0] != ENDPOINT:
            raise Refusal(404, "resource_not_found", "no such endpoint")
        if rest[1:] == ["lease"]:
            return self._renew(body["seconds"])
        if rest[1:] in (["revert"], ["pause"], ["resume"]):
            return self._decide(rest[1], (body or {}).get("name", "key"))
        return 200, dict(self.endpoint)

    def make_endpoint(self, weights: Mapping[str, int], lease_seconds: int = 0) -> None:
        """Create an endpoint as if somebody else had made it."""
        members = [{"id": key, "traffic_percentage": value} for key, value in weights.items()]
        lease = {"seconds": lease_seconds, "fallback": members} if lease_seconds else None
        self._make("shop", members, lease)

    def _create(self, body: Any) -> Answer:
        self.created += 1
        self._make(body["name"], body["deployments"], body.get("lease"))
        return 201, dict(self.endpoint or {})

    def _make(self, name: str, members: list[dict[str, Any]], lease: dict[str, Any] | None) -> None:
        self.endpoint = {
            "id": ENDPOINT,
            "name": name,
            "url": f"{self.url}/v1/endpoints/{ENDPOINT}/generate",
            "created_at": as_text(self.now),
            "updated_at": as_text(self.now),
            "status": "active",
            "deployments": [],
        }
        if self.extensions:
            self.endpoint |= {"version": 0, "lease": None, "large_keys": "spread"}
        self._change(members, lease)

    def _patch(self, body: Any, headers: Mapping[str, str]) -> Answer:
        if self.before_patch is not None:
            happens, self.before_patch = self.before_patch, None
            happens()
        action = self.patch_script.pop(0) if self.patch_script else "ok"
        status = self._refuse_patch(body, headers, action)
        self.patches.append(
            Patch(
                tick=self.ticks,
                weights={one["id"]: one["traffic_percentage"] for one in body["deployments"]},
                if_match=headers.get("If-Match"),
                idempotency_key=headers.get("Idempotency-Key"),
                lease=body.get("lease"),
                status=status,
            )
        )
        if status != 200:
            code = "internal_error" if status >= 500 else "invalid_request_error"
            raise Refusal(status, code, "not applied")
        for _ in range(2 if action == "twice" else 1):
            self._change(body["deployments"], body.get("lease"), body.get("rollout_id"))
        if action == "lose":
            raise LostAnswer
        return 200, dict(self.endpoint or {})

    def _refuse_patch(self, body: Any, headers: Mapping[str, str], action: str) -> int:
        if action == "fail":
            return 500
        if not self.extensions:
            return 400 if "lease" in body else 200
        version = self.endpoint["version"] if self.endpoint else 0
        wanted = headers.get("If-Match")
        if wanted is not None and wanted != f'"{version}"':
            return 412
        return 409 if self._is_held(body["deployments"], body.get("lease")) else 200

    def _is_held(self, members: list[dict[str, Any]], lease: Any) -> bool:
        """Whether a pause forbids the split: it is neither the present one, under a lease, nor the fallback."""
        if not self.endpoint or not self.endpoint["paused"]:
            return False

        def traffic(split: list[dict[str, Any]]) -> dict[str, int]:
            shares = {one["id"]: one["traffic_percentage"] for one in split}
            return {name: share for name, share in shares.items() if share}

        allowed = [traffic(self.endpoint["lease"]["fallback"])]
        if lease:
            allowed.append(traffic(self.endpoint["deployments"]))
        return traffic(members) not in allowed

    def _decide(self, verb: str, by: str, **said: Any) -> Answer:
        lease = self.endpoint["lease"] if self.endpoint else None
        if not self.endpoint or not lease:
            raise Refusal(409, "invalid_request_error", "no lease is running")
        decided = {"at": as_text(self.now), "by": by, "reason": None, "ticket": None, **said}
        if verb == "revert":
            self._change(lease["fallback"], None, self.endpoint.get("rollout_id"))
            self.endpoint["reverted"] = decided
        elif (verb == "pause") == bool(self.endpoint["paused"]) or not lease["pausable"]:
            raise Refusal(409, "invalid_request_error", "not in this state")
        else:
            self.endpoint["paused"] = decided if verb == "pause" else None
        return 200, dict(self.endpoint)

    def decide(self, verb: str, by: str = "a person", **said: Any) -> None:
        """Revert, pause or resume, as a person does, who has `said` why and who they are."""
        with self._lock:
            self._decide(verb, by, **said)

    def _renew(self, seconds: int) -> Answer:
        if not self.endpoint or not self.endpoint["lease"]:
            raise Refusal(409, "invalid_request_error", "no lease is running")
        if seconds == 0:
            if self.endpoint["paused"]:
                raise Refusal(409, "invalid_request_error", "the rollout is paused")
            self._change(self.endpoint["deployments"], None)
        else:
            self.renewed_for = seconds
            self.lease_ends = time.monotonic() + seconds
        return 200, dict(self.endpoint)

    def _change(
        self,
        members: list[dict[str, Any]],
        lease: dict[str, Any] | None,
        rollout_id: str | None = None,
    ) -> None:
        if self.endpoint is None:
            return
        self.endpoint |= {"deployments": members, "updated_at": as_text(self.now)}
        if self.extensions:
            ends = as_text(self.now + timedelta(days=1))
            shown = {"pausable": False, **lease, "expires_at": ends} if lease else None
            paused = self.endpoint.get("paused")
            is_same = lease and members == self.endpoint["deployments"]
            self.endpoint |= {"version": self.endpoint["version"] + 1, "lease": shown}
            self.endpoint |= {"paused": paused if is_same else None, "reverted": None}
            self.endpoint["rollout_id"] = rollout_id
            self.lease_ends = time.monotonic() + lease["seconds"] if lease else None

    def change_from_outside(self, weights: Mapping[str, int]) -> None:
        """Change the split as if somebody else had done it."""
        with self._lock:
            members = [{"id": key, "traffic_percentage": value} for key, value in weights.items()]
            self._change(members, None)

    def _generate(self, body: Any) -> Answer:
        if self.refuse_generation is not None:
            self.refused_at.append(time.monotonic())
            raise self.refuse_generation
        weights = self._weights()
        served = len(self.generations)
        candidate = weights.get(CANDIDATE, 0)
        name = CANDIDATE if (served * 37) % 100 < candidate else BASELINE
        self.generations.append(name)
        arm = self.arms[name]
        if arm.rounded("generate", arm.error_share(self.ticks, candidate)):
            raise Refusal(500, "internal_error", "generation failed", served_by=name)
        blank = bool(arm.rounded("blank", arm.empty_share))
        return 200, {
            "id": f"gen_{served}",
            "deployment_id": name,
            "prompt": body["prompt"],
            "completion": " " if blank else "text",
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        }


def as_text(moment: datetime) -> str:
    """Format a time as in the API."""
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _series(rows: list[tuple[int, Tally]], extensions: bool, silence: str | None) -> dict[str, Any]:
    """Return the four metrics in the service's format; `silence` chooses how missing requests are shown."""
    if silence == "empty":
        rows = []
    seconds = BUCKET.total_seconds()
    shown = rows if silence in ("zeros", "nulls") else [row for row in rows if row[1].requests]
    stamps = [as_text(EPOCH + number * BUCKET) for number, _ in rows]
    some = [as_text(EPOCH + number * BUCKET) for number, _ in shown]
    tallies = [one for _, one in shown]
    nothing = None if silence == "nulls" else 0.0

    def percent(one: Tally) -> float | None:
        return 100 * one.errors / one.requests if one.requests else nothing

    metrics: dict[str, dict[str, Any]] = {
        "latency": {"timestamps": some}
        | {
            key: [one.percentiles_ms[place] if one.requests else nothing for one in tallies]
            for place, key in enumerate(("p50", "p95", "p99"))
        }
        | {"average": [one.percentiles_ms[0] if one.requests else nothing for one in tallies]},
        "throughput": {
            "timestamps": stamps,
            "requests_per_second": [
                nothing if silence else one.requests / seconds for _, one in rows
            ],
        },
        "error_rate": {"timestamps": some, "percentage": [percent(one) for one in tallies]},
        "token_usage": {"timestamps": stamps}
        | {
            key: [None if silence == "nulls" else times * one.requests for _, one in rows]
            for key, times in (("total", 40), ("input", 30), ("output", 10))
        },
    }
    if extensions and silence is None:
        for series in metrics.values():
            series["complete"] = [True] * len(series["timestamps"])
        metrics["error_rate"]["request_count"] = [one.requests for one in tallies]
        metrics["error_rate"]["error_count"] = [one.errors for one in tallies]
        metrics["token_usage"]["empty_count"] = [one.empty for _, one in rows]
    return metrics


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = (
        128  # with the default of 5, a short stall would drop connections of the traffic driver
    )


class _Handler(BaseHTTPRequestHandler):
    service: FakeService
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        content = self.rfile.read(length)
        kind = self.headers.get("Content-Type", "")
        if kind.startswith("multipart/"):  # forms are parsed by the subclass
            body: Any = f"Content-Type: {kind}\r\n\r\n".encode() + content
        else:
            body = json.loads(content) if length else None
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        headers: dict[str, str] = {}
        try:
            status, answer = self.service.answer(
                self.command, parts.path, query, body, self.headers
            )
        except Refusal as refusal:
            status, answer = refusal.answer
            headers = refusal.headers
        except LostAnswer:
            self.close_connection = True
            return
        if parts.path.endswith("/generate") and self.service.breaks_off == "before it":
            self.close_connection = True
            return
        if status == 200 and self.service.streams and (body or {}).get("stream"):
            self._stream(answer)
            return
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a killed client reads no answer
            self.wfile.write(content)

    def _stream(self, answer: dict[str, Any]) -> None:
        """Send the answer as events: first its text, then the whole answer."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("X-Deployment-ID", answer["deployment_id"])
        self.end_headers()
        piece = json.dumps({"text": answer["completion"]})
        self.wfile.write(f"event: token\ndata: {piece}\n\n".encode())
        if not self.service.breaks_off:
            self.wfile.write(f"event: done\ndata: {json.dumps(answer)}\n\n".encode())

    do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - the names are given by http.server

    def log_message(self, *_: object) -> None:
        """Do not log requests."""
