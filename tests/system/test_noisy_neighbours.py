"""One tenant does not slow the others down: it uses each costly operation up to its limits, while another tenant reads
its deployment and generates.

The medians of a real service are compared with those of the same minute without the load, so that a busy machine slows
both.
"""

import json
import random
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.models.hostile_adapters import ARCHIVES
from tests.support.service.in_process import jsonl
from tests.support.service.processes import Serve, start
from tests.support.waiting import PATIENCE_S, until
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.prompts.template import TEMPLATE_FILE
from tuneship.security.master_key import derived_secret, read_or_make_secret
from tuneship.service.access.api_keys import Keys
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.service.serve import utc_now
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.database.tables import job_metrics
from tuneship.store.records.audit import Chain

pytestmark = [pytest.mark.slow, pytest.mark.long]

# Highest ratio of the other tenant's median under load to its idle median, on a machine that does nothing else.
TIMES = 3.0
# Highest ratio if other tests use the processors, too; before tenants took turns it was 40 and more.
TIMES_BESIDE_OTHER_TESTS = 20.0
TRIES = 3
IDLE_S, LOADED_S = 2.0, 6.0
# A health check that is faster counts as this long: a few milliseconds vary by more than three times.
LEAST_HEALTH_S = 0.02
# Least seconds per round of the other tenant; a faster one would exceed its rate of 600 requests a minute.
ROUND_S = 0.15
MEBIBYTE = 1 << 20
DEPLOYMENTS = 100
STEPS = 50_000
WORDS = [
    "patient",
    "admitted",
    "acute",
    "fracture",
    "left",
    "rib",
    "pain",
    "fever",
    "cough",
    "diagnosis",
    "of",
    "the",
    "with",
]


class Tenant:
    """A client of the service with a key and a rate of its own."""

    def __init__(self, serve: Serve, keys: Keys, name: str) -> None:
        key = keys.issue(name, SCOPES, None)
        self.name = name
        self.headers = {"Authorization": f"Bearer {key}", "X-Client-ID": name}
        self.port = int(serve.url.rpartition(":")[2])
        self.http = httpx.Client(
            base_url=serve.url, headers=self.headers, timeout=PATIENCE_S, trust_env=False
        )

    def ask(self, method: str, path: str, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.is_success, answer.text
        return answer.json()

    def dataset(self, content: bytes) -> str:
        files = {"file": ("x.jsonl", content, "application/jsonl")}
        form = {"name": "d", "format": "instruction"}
        return self.ask("POST", "/v1/datasets", data=form, files=files)["id"]

    def deployment(self, name: str) -> str:
        body = {"model_name": "tuneship-tiny", "deployment_name": name}
        return self.ask("POST", "/v1/deployments", json=body)["id"]

    def is_running(self, made: str) -> bool:
        return self.ask("GET", f"/v1/deployments/{made}")["status"] == "running"

    def request(self, method: str, path: str, body: bytes = b"", media: str = "") -> bytes:
        """Return the bytes of a request."""
        fields = {
            **self.headers,
            "Host": "x",
            "Content-Type": media or "application/json",
            "Content-Length": str(len(body)),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


@dataclass
class Load:
    """The requests that a tenant sends repeatedly."""

    requests: list[bytes]
    connections: int = 8
    is_read: bool = True


def _generation(tenant: Tenant, deployment: str, **fields: Any) -> bytes:
    body = json.dumps({"max_tokens": 1} | fields).encode()
    return tenant.request("POST", f"/v1/deployments/{deployment}/generate", body)


def _form(tenant: Tenant, path: str, content: bytes) -> bytes:
    parts = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % part
        for part in ((b"name", b"d"), (b"format", b"instruction"))
    )
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    body = parts + head + content + b"\r\n--b--\r\n"
    if path.endswith("validate"):
        body = body.replace(b'--b\r\nContent-Disposition: form-data; name="name"\r\n\r\nd\r\n', b"")
    return tenant.request("POST", path, body, "multipart/form-data; boundary=b")


def _rows(size: int, seed: int = 0) -> bytes:
    """Return about `size` bytes of examples, none of them twice."""
    dice, lines = random.Random(seed), list[bytes]()  # noqa: S311 - the text is for a test
    while sum(map(len, lines[-1:])) * len(lines) < size:
        text = " ".join(dice.choices(WORDS, k=30))
        lines.append(jsonl({"instruction": f"{len(lines)} {text}", "response": "chapter"}))
    return b"".join(lines)


def merge(tenant: Tenant, _serve: Serve) -> Load:
    sources = [tenant.dataset(_rows(2_400_000, seed)) for seed in (1, 2)]
    body = json.dumps({"dataset_ids": sources, "name": "m"}).encode()
    return Load([tenant.request("POST", "/v1/datasets/merge", body)], connections=40)


def upload(tenant: Tenant, _serve: Serve) -> Load:
    return Load([_form(tenant, "/v1/datasets", _rows(MEBIBYTE))])


def validate(tenant: Tenant, _serve: Serve) -> Load:
    return Load([_form(tenant, "/v1/datasets/validate", _rows(MEBIBYTE))])


def _to_jobs(tenant: Tenant, *bodies: bytes) -> Load:
    return Load([tenant.request("POST", "/v1/fine-tuning/jobs", body) for body in bodies])


def large_json(tenant: Tenant, _serve: Serve) -> Load:
    fields = {f"field_{number}": "x" * 90 for number in range(9_000)}
    escapes = b'{"model_name":"' + b"\\u00e9" * 170_000 + b'"}'
    return _to_jobs(tenant, json.dumps(fields).encode(), escapes)


def crowded_json(tenant: Tenant, _serve: Serve) -> Load:
    return _to_jobs(tenant, b'{"a":[' + b"[]," * 349_000 + b"[]]}")


def deep_json(tenant: Tenant, _serve: Serve) -> Load:
    lists = b"[" * 31 + b"]" * 31
    return _to_jobs(tenant, b"[" * MEBIBYTE, b'{"a":[' + b",".join([lists] * 300) + b"]}")


def long_prompt(tenant: Tenant, _serve: Serve) -> Load:
    made = tenant.deployment("long")
    until(lambda: tenant.is_running(made))
    sizes = (1_500, 9_000, 900_000)
    prompts = [" ".join(random.Random(1).choices(WORDS, k=size // 6)) for size in sizes]  # noqa: S311
    return Load([_generation(tenant, made, prompt=prompt) for prompt in prompts])


def long_lists(tenant: Tenant, _serve: Serve) -> Load:
    for _ in range(100):
        tenant.dataset(jsonl({"instruction": "a", "response": "b"}))
    paths = ("/v1/datasets?limit=100", "/v1/models?limit=100", "/v1/events?limit=100")
    return Load([tenant.request("GET", path) for path in paths], connections=16)


def metrics_of_a_job(tenant: Tenant, serve: Serve) -> Load:
    body = {"base_model": "tuneship-tiny", "model_name": "m"}
    body["dataset_id"] = tenant.dataset(_rows(1_000))
    job = tenant.ask("POST", "/v1/fine-tuning/jobs", json=body)["id"]
    tenant.ask("POST", f"/v1/fine-tuning/jobs/{job}/cancel")
    where = f"/v1/fine-tuning/jobs/{job}"
    until(lambda: tenant.ask("GET", where)["status"] in ("cancelled", "completed"))
    names = ("training_loss", "validation_loss", "learning_rate", "epoch", "accuracy", "perplexity")
    steps = [
        {"job_id": job, "step": 1000 + step} | dict.fromkeys(names, step / 7)
        for step in range(STEPS)
    ]
    database = Database(sqlite_url(serve.data_dir / "tuneship.sqlite"))
    with database.write() as connection:
        connection.execute(sa.insert(job_metrics), steps)
    database.close()
    return Load([tenant.request("GET", f"{where}/metrics")])


def a_hundred_deployments(tenant: Tenant, _serve: Serve) -> Load:
    made = [tenant.deployment(f"d{number}") for number in range(DEPLOYMENTS)]
    until(lambda: tenant.is_running(made[-1]))
    asked = {"prompt": "Fracture of rib", "temperature": 2, "max_tokens": 100}
    return Load([_generation(tenant, one, **asked) for one in made], connections=64)


def streams_that_nobody_reads(tenant: Tenant, _serve: Serve) -> Load:
    made = tenant.deployment("unread")
    until(lambda: tenant.is_running(made))
    asked = {"prompt": "Fracture", "temperature": 2, "max_tokens": 400, "stream": True}
    return Load([_generation(tenant, made, **asked)], connections=64, is_read=False)


def log_probabilities(tenant: Tenant, _serve: Serve) -> Load:
    made = tenant.deployment("scored")
    until(lambda: tenant.is_running(made))
    asked = {"prompt": "Fracture", "temperature": 2, "max_tokens": 24, "n": 64, "logprobs": 20}
    streamed = asked | {"stream": True}
    return Load([_generation(tenant, made, **one) for one in (asked, streamed)], connections=2)


def a_slow_template(tenant: Tenant, _serve: Serve) -> Load:
    """Send the words at which the template of an operator's base model begins to loop, double a text, or write much."""
    body = {"model_name": SLOW_MODEL, "deployment_name": "slow"}
    made = tenant.ask("POST", "/v1/deployments", json=body)["id"]
    until(lambda: tenant.is_running(made))
    return Load([_generation(tenant, made, prompt=word) for word in SLOW_WORDS])


def an_endless_schema(tenant: Tenant, _serve: Serve) -> Load:
    """Ask for one of four multiples. Their automaton has more states than a compiler can ever visit."""
    made = tenant.deployment("endless")
    until(lambda: tenant.is_running(made))
    multiples = [{"type": "number", "multipleOf": one} for one in (997, 991, 983, 977)]
    form = {"type": "json_schema", "schema": {"type": "array", "items": {"anyOf": multiples}}}
    return Load([_generation(tenant, made, prompt="Fracture", response_format=form)])


def many_large_schemas(tenant: Tenant, _serve: Serve) -> Load:
    """Ask again and again for other schemas that are as costly as the limits allow, so that none is kept."""
    made = tenant.deployment("schemas")
    until(lambda: tenant.is_running(made))
    forms = [
        {
            "type": "json_schema",
            "schema": {"enum": [{f"k{one}": [one, {"a": number}]} for one in range(1_000)]},
        }
        for number in range(100)
    ]
    asked = [_generation(tenant, made, prompt="Fracture", response_format=form) for form in forms]
    return Load(asked)


def batches(tenant: Tenant, _serve: Serve) -> Load:
    made = tenant.deployment("night")
    until(lambda: tenant.is_running(made))
    body = {"model": made, "prompt": "Fracture", "max_tokens": 16}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    content = jsonl(*[{"custom_id": f"{number}", **line} for number in range(5_000)])
    asked: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("x.jsonl", content)}}
    file = tenant.ask("POST", "/openai/v1/files", **asked)["id"]
    order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    path = "/openai/v1/batches"
    return Load([tenant.request("POST", path, json.dumps(order).encode())], connections=2)


def _imports(name: str) -> Callable[[Tenant, Serve], Load]:
    """Upload a hostile adapter again and again; the callers leave before the answer where it does not come at once."""

    def load(tenant: Tenant, _serve: Serve) -> Load:
        boundary = b"--b\r\nContent-Disposition: form-data; "
        head = boundary + b'name="file"; filename="a.tar"\r\n\r\n'
        model = boundary + b'name="base_model"\r\n\r\ntuneship-tiny\r\n'
        body = model + head + ARCHIVES[name] + b"\r\n--b--\r\n"
        media = "multipart/form-data; boundary=b"
        return Load([tenant.request("POST", "/v1/models", body, media)], connections=4)

    load.__name__ = name.replace(" ", "_").replace("'", "")
    return load


LOADS: list[Callable[[Tenant, Serve], Load]] = [
    merge, upload, validate, large_json, crowded_json, deep_json, long_prompt, long_lists,
    metrics_of_a_job, a_hundred_deployments, streams_that_nobody_reads,
]  # fmt: skip
ATTACKS = [
    log_probabilities, a_slow_template, an_endless_schema, many_large_schemas, batches,
    *map(_imports, ARCHIVES),
]  # fmt: skip
# Work in a thread, long answers, connections that stay.
PER_COMMIT = (merge, long_prompt, streams_that_nobody_reads)
SLOW_MODEL = "slow-template"
SLOW_WORDS = {
    "BOOM": "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}",
    "TWICE": "{% set n = namespace(x='a') %}{% for _ in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "MUCH": "a " * 40_000,
}


@dataclass
class Neighbour:
    """The other tenant, with one deployment and one request at a time."""

    tenant: Tenant
    deployment: str = ""

    def settle(self) -> None:
        self.deployment = self.tenant.deployment("own")
        until(lambda: self.tenant.is_running(self.deployment))

    def times(self, seconds: float) -> list[float]:
        """Repeatedly read the deployment and generate sixteen tokens; return the time of each round."""
        body = {"prompt": "Fracture of rib", "max_tokens": 16, "temperature": 2, "seed": 1}
        found: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(found) < 5:
            begun = time.perf_counter()
            listed = self.tenant.ask("GET", "/v1/deployments")["deployments"]
            assert [one["status"] for one in listed] == ["running"]
            self.tenant.ask("POST", f"/v1/deployments/{self.deployment}/generate", json=body)
            took = time.perf_counter() - begun
            found.append(took)
            time.sleep(max(0.0, ROUND_S - took))
        return found


@dataclass
class Figures:
    """Measured times and answers of one operation."""

    idle_health_s: float

    name: str
    idle_s: float
    loaded_s: float
    health_s: float
    answers: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def ratio(self) -> float:
        return self.loaded_s / self.idle_s

    def __str__(self) -> str:
        answers = ", ".join(f"{count} x {status}" for status, count in sorted(self.answers.items()))
        return (
            f"| {self.name} | {self.idle_s * 1000:.0f} ms | {self.loaded_s * 1000:.0f} ms "
            f"| {self.ratio:.2f} | {self.health_s * 1000:.0f} ms | {answers} |"
        )


class Health:
    """Requests `/healthz` five times a second, each time on a new connection."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_over = threading.Event()
        self.times: list[float] = []
        self._thread = threading.Thread(target=self._probe)

    def _probe(self) -> None:
        with httpx.Client(trust_env=False, timeout=PATIENCE_S) as http:
            while not self._is_over.wait(0.2):
                begun = time.perf_counter()
                closing = {"Connection": "close"}
                http.get(f"{self._url}/healthz", headers=closing).raise_for_status()
                self.times.append(time.perf_counter() - begun)

    def __enter__(self) -> "Health":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


@contextmanager
def running_load(load: Load, port: int, folder: Path) -> Iterator[dict[str, int]]:
    """Run the load inside the block; afterwards the yielded dict holds the counts of its answers."""
    folder.mkdir(exist_ok=True)
    for number, request in enumerate(load.requests):
        (folder / f"{number:04}").write_bytes(request)
    arguments = [str(port), str(folder), "--connections", str(load.connections)]
    arguments += [] if load.is_read else ["--unread"]
    program = start("tests.support.faults.noisy_neighbour", *arguments, stdin=subprocess.PIPE)
    answers: dict[str, int] = {}
    try:
        time.sleep(1)  # wait until the load is running
        yield answers
        said, _ = program.communicate(timeout=PATIENCE_S)
        answers.update(json.loads(said))
    finally:
        program.kill()
        program.wait(PATIENCE_S)


@dataclass
class Measurements:
    """A service and the tenant whose times are measured."""

    serve: Serve
    keys: Keys
    neighbour: Neighbour
    folder: Path
    figures: list[Figures] = field(default_factory=list[Figures])
    numbers: "count[int]" = field(default_factory=count)

    def measure_with_new_tenant(self, name: str, load: Callable[[Tenant, Serve], Load]) -> Figures:
        """Measure one load, sent by a new tenant, whose rate limit is unused."""
        tenant = Tenant(self.serve, self.keys, f"noisy-{next(self.numbers)}")
        try:
            return self.measure(name, load(tenant, self.serve))
        finally:
            tenant.http.close()

    def measure(self, name: str, load: Load) -> Figures:
        with Health(self.serve.url) as resting:
            idle = self.neighbour.times(IDLE_S)
        port = self.neighbour.tenant.port
        with (
            Health(self.serve.url) as health,
            running_load(load, port, self.folder / name) as answers,
        ):
            loaded = self.neighbour.times(LOADED_S)
        idle += self.neighbour.times(IDLE_S)
        assert health.times
        middle = statistics.median
        return Figures(
            middle(resting.times),
            name,
            middle(idle),
            middle(loaded),
            middle(health.times),
            answers,
        )


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    folder = tmp_path_factory.mktemp("street")
    slow = folder / SLOW_MODEL
    shutil.copytree(SHIPPED / "tuneship-tiny", slow)
    template = slow / TEMPLATE_FILE
    for word, source in SLOW_WORDS.items():
        with_word = "{% if '" + word + "' in messages[-1].content %}" + source + "{% endif %}"
        template.write_text(with_word + template.read_text())
    catalogue = folder / "models.yaml"
    models = [{"id": "tuneship-tiny", "path": str(SHIPPED / "tuneship-tiny")}]
    models.append({"id": SLOW_MODEL, "path": str(slow)})
    catalogue.write_text(json.dumps({"models": models}))
    settings: dict[str, Any] = {
        "model_catalogue": str(catalogue),
        "control_requests_per_minute": "600",
        "maximum_deployments": str(DEPLOYMENTS),
        "replica_processes": "1",
        "preload_training": "false",
    }
    serve = Serve(folder / "data", preload=True, **settings)
    secret = read_or_make_secret(serve.data_dir / "master.key")
    database = Database(sqlite_url(serve.data_dir / "tuneship.sqlite"))
    audit = Chain(derived_secret(secret, "audit"))
    keys = Keys(database, derived_secret(secret, "keys"), utc_now, audit)
    neighbour = Neighbour(Tenant(serve, keys, "neighbour"))
    neighbour.settle()
    made = Measurements(serve, keys, neighbour, folder)
    yield made
    neighbour.tenant.http.close()
    database.close()
    serve.stop()
    print(  # noqa: T201 - the figures are for docs/performance.md
        "\n| load of another tenant | idle | under the load | times | /healthz | its answers |",
        "|---|---|---|---|---|---|",
        *made.figures,
        sep="\n",
    )


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(TIMES_BESIDE_OTHER_TESTS, id="beside-other-tests"),
        pytest.param(TIMES, id="alone", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(load, id=load.__name__, marks=[] if load in PER_COMMIT else pytest.mark.soak)
        for load in LOADS
    ],
)
def test_a_tenant_does_not_slow_another_down(
    measurements: Measurements, load: Callable[[Tenant, Serve], Load], times: float
) -> None:
    name = load.__name__.replace("_", " ")
    for _ in range(TRIES):  # other work on the machine may have slowed the loaded seconds alone
        figures = measurements.measure_with_new_tenant(name, load)
        if figures.ratio < times:
            break
    measurements.figures.append(figures)
    assert sum(figures.answers.values()) > 0
    assert not {"500", "502", "504"} & figures.answers.keys(), figures
    assert figures.ratio < times, figures


@pytest.mark.soak
@pytest.mark.parametrize("load", ATTACKS, ids=lambda load: load.__name__)
def test_no_attack_slows_another_tenant_down(
    measurements: Measurements, load: Callable[[Tenant, Serve], Load]
) -> None:
    """Another tenant's list and generation, and the health check, take at most three times as long as without it."""
    name = load.__name__.replace("_", " ")
    for _ in range(TRIES):
        figures = measurements.measure_with_new_tenant(name, load)
        most_s = TIMES * max(figures.idle_health_s, LEAST_HEALTH_S)
        if figures.ratio < TIMES and figures.health_s < most_s:
            break
    measurements.figures.append(figures)
    assert not {"500", "502", "504"} & figures.answers.keys(), figures
    assert figures.ratio < TIMES, figures
    assert figures.health_s < most_s, figures
