"""Every case of `bad_inputs.yaml` is answered as it says, and changes nothing."""

import gzip
import hashlib
import json
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
import yaml

from tests.service.in_process import LINES, Service, jsonl, split
from tuneship.service.access import every_scope, new_key
from tuneship.store import idempotency, tables
from tuneship.store.identifiers import new_id

CASES: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("bad_inputs.yaml").read_text()
)
GOOD = jsonl(*LINES)
TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINE = b'{"instruction":"case","response":"chapter"}\n'


async def _chunks() -> AsyncIterator[bytes]:
    for _ in range(40):
        yield b" " * (1 << 15)


def _form(*parts: str, end: str = "--b--\r\n") -> bytes:
    heads = [f"--b\r\nContent-Disposition: form-data; {part}\r\n" for part in parts]
    return ("".join(heads) + end).encode()


FILE_PART = 'name="file"; filename="x"\r\nContent-Type: application/jsonl\r\n\r\n' + GOOD.decode()
FORM = ('name="name"\r\n\r\nx', 'name="format"\r\n\r\ninstruction', FILE_PART)
BODIES: dict[str, Any] = {
    "gzip_bomb": gzip.compress(b"0" * 10_000_000),
    "over_1_mib": b" " * ((1 << 20) + 1),
    "over_1_mib_in_chunks": _chunks,
    "byte_order_mark": b'\xef\xbb\xbf{"model_name":"m"}',
    "invalid_utf8": b'{"model_name":"\xff"}',
    "control_byte": b'{"model_name":"a\x01b"}',
    "deep": b"[" * 50_000,
    "levels_33": b'{"a":' * 33 + b"1" + b"}" * 33,
    "form_cut": _form(*FORM, end="")[:-60],
    "form_cut_at_end": _form(*FORM, end="\r\n--b"),
    "form_of_1001": _form(*(f'name="p{number}"\r\n\r\nx' for number in range(1001))),
}
FILES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n \n\n",
    "array": b"[1]\n" + LINE,
    "no_response": LINE + b'{"instruction":"a"}\n',
    "empty_instruction": b'{"instruction":"","response":"b"}\n' * 3,
    "long_line": b'{"instruction":"' + b"a" * (8 << 20) + b'"}\n' + LINE,
    "nan": b'{"instruction":"a","response":"b","metadata":{"x":NaN}}\n',
    "invalid_utf8": LINE * 6 + b'{"instruction":"\xff","response":"b"}\n',
    "nul_byte": b'{"instruction":"a\x00","response":"b"}\n',
    "nul_escaped": b'{"instruction":"a\\u0000","response":"b"}\n',
    "duplicate_keys": b'{"instruction":"a","instruction":"c","response":"b"}\n',
    "gzip": gzip.compress(LINE),
    "utf16": LINE.decode().encode("utf-16"),
    "csv": b"instruction,response\na,b\n",
    "pretty": json.dumps(LINES[0], indent=2).encode(),
    "mixed": LINE + jsonl(TURNS),
    "html": LINE,
    "two": LINE,
}


MANY: dict[str, Any] = {
    "<65 tags>": {f"k{number}": "v" for number in range(65)},
    "<101 ids>": [new_id("ds") for _ in range(101)],
    "<11 members>": split({new_id("dep"): share for share in (90, *range(10))})["deployments"],
}


class World:
    """A service in the state that the cases start from; its supervisor rests, so nothing else changes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.__enter__()
        self.ids = {f"{kind}_missing": new_id(kind) for kind in ("ft", "ds", "dep", "cep", "ep")}
        self._own()
        self._others()
        service.run(self._rest())
        self.ids |= {
            "dep_deleting": self._copy(tables.deployments, "dep_other", "dep", "deleting"),
            "dep_creating": self._copy(tables.deployments, "dep_other", "dep", "creating"),
            "ds_processing": self._copy(tables.datasets, "ds_own", "ds", "processing"),
        }
        self.keys = self._keys()
        self._use_idempotency_keys()

    def _own(self) -> None:
        service = self.service
        service.model()
        conversation = service.dataset(content=jsonl(TURNS, TURNS), format="conversation")
        self.ids |= {
            "ds_own": service.dataset(),
            "ds_single": service.dataset(content=LINE),
            "ds_conversation": conversation,
            "ft_own": service.job(),
            "dep_own": service.deployment("own"),
            "dep_other": service.deployment("other"),
        }
        with service.database.read() as connection:
            ended = sa.select(tables.jobs.c.id).where(tables.jobs.c.status == "completed")
            self.ids["ft_ended"] = connection.scalars(ended).one()
        shares = {self.ids["dep_own"]: 90, self.ids["dep_other"]: 10}
        self.ids["cep_own"] = service.canary("own", shares)

    def _others(self) -> None:
        service = self.service
        deployment = service.deployment("theirs", "bob")
        self.ids |= {
            "model_of_other_tenant": service.model("bob"),
            "ds_of_other_tenant": service.dataset("bob"),
            "ft_of_other_tenant": service.job("bob"),
            "dep_of_other_tenant": deployment,
            "cep_of_other_tenant": service.canary("theirs", {deployment: 100}, "bob"),
        }

    async def _rest(self) -> None:
        self.service._running.cancel()

    def _copy(self, table: sa.Table, source: str, kind: str, status: str) -> str:
        with self.service.database.write() as connection:
            query = sa.select(table).where(table.c.id == self.ids[source])
            row = dict(connection.execute(query).mappings().one())
            row |= {"id": new_id(kind), "status": status}
            connection.execute(sa.insert(table).values(**row))
        return row["id"]

    def _keys(self) -> dict[str, Any]:
        service = self.service
        full = service.headers["alice"]
        key = full["Authorization"]
        expired = service.keys.issue("alice", every_scope(), datetime.now(UTC) - timedelta(1))

        def holding(*scopes: str) -> dict[str, str]:
            return service.key_headers("alice", frozenset(scopes))

        return {
            "none": {},
            "only_client": {"X-Client-ID": "alice"},
            "basic": {**full, "Authorization": "Basic dXNlcjpwYXNz"},
            "empty": {**full, "Authorization": "Bearer "},
            "unknown": {**full, "Authorization": f"Bearer {new_key()}"},
            "wrong_secret": {**full, "Authorization": _other_secret(key)},
            "not_ascii": {**full, "Authorization": (key[:-1] + "\xe9").encode("latin-1")},
            "crossed": {**full, "X-Client-ID": "bob"},
            "expired": {**full, "Authorization": f"Bearer {expired}"},
            "twice": [*full.items(), ("Authorization", service.headers["bob"]["Authorization"])],
            "sql": {**full, "X-Client-ID": "x' OR 1=1 --"},
            "reader": holding("jobs:read", "datasets:read", "models:read"),
            "deployer": holding("deployments:write", "models:read"),
        }

    def _use_idempotency_keys(self) -> None:
        body = json.dumps(self.valid("POST /v1/fine-tuning/jobs")).encode()
        headers = {"Idempotency-Key": "used", "Content-Type": "application/json"}
        self.service.call("POST", "/v1/fine-tuning/jobs", headers=headers, content=body)
        asked = f"POST\n/v1/fine-tuning/jobs\n{hashlib.sha256(body).hexdigest()}"
        key = idempotency.Key("alice", "busy", hashlib.sha256(asked.encode()).hexdigest())
        with self.service.database.write() as connection:
            idempotency.begin(connection, key, datetime.now(UTC))

    def valid(self, send: str) -> dict[str, Any]:
        """The smallest valid body of an operation."""
        ids = self.ids
        members = split({ids["dep_own"]: 50, ids["dep_other"]: 50})
        job = {"base_model": "tuneship-tiny", "dataset_id": ids["ds_own"], "model_name": "m"}
        return {
            "POST /v1/fine-tuning/jobs": job,
            "POST /v1/datasets/merge": {
                "dataset_ids": [ids["ds_own"], ids["ds_single"]],
                "name": "m",
            },
            "POST /v1/deployments": {"model_name": "tuneship-tiny", "deployment_name": "new"},
            "PATCH /v1/deployments/": {"min_replicas": 1},
            "POST /v1/canary-endpoints": {"name": "new", **members},
            "PATCH /v1/canary-endpoints/": members,
            "generate": {"prompt": "a"},
        }[re.sub(r".*(generate)$|(PATCH /v1/.*/){.*", r"\1\2", send)]

    def words(self, value: Any) -> Any:
        """Fill in ids and grow texts."""
        if isinstance(value, dict):
            return {key: self.words(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.words(one) for one in value]
        if not isinstance(value, str):
            return value
        if value in MANY:
            return MANY[value]
        text = re.sub(r"<(\d+) characters>", lambda found: "x" * int(found[1]), value)
        return re.sub(r"{(\w+)}", lambda found: self.ids.get(found[1], found[0]), text)

    def state(self) -> tuple[Any, ...]:
        """Every row but counters of metrics, and every file."""
        ignored = {"metric_windows", "api_keys"}
        with self.service.database.read() as connection:
            rows = {
                name: sorted(map(repr, connection.execute(sa.select(table))))
                for name, table in tables.METADATA.tables.items()
                if name not in ignored
            }
        root = self.service.settings.data_dir
        files = sorted(
            str(path) for name in ("blobs", "scratch", "work") for path in (root / name).rglob("*")
        )
        return rows, files


def _other_secret(authorization: str) -> str:
    from tuneship.service.access import _checksum

    head, _, tail = authorization.removeprefix("Bearer ")[:-7].rpartition("_")
    text = f"{head}_{tail[::-1]}"
    return f"Bearer {text}_{_checksum(text)}"


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    service = Service(tmp_path_factory.mktemp("world"), allow_fault_injection=True)
    made = World(service)
    yield made
    service.__exit__()


def request_of(world: World, case: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """Method, path and httpx options of a case."""
    method, path = world.words(case["send"]).split(" ", 1)
    given: Any = world.keys[case["key"]] if "key" in case else world.service.headers["alice"]
    headers = httpx.Headers(given)
    options: dict[str, Any] = form_of(world, case) if "form" in case else {}
    content = content_of(world, case)
    if content is not None:
        options["content"] = content
        is_form = str(case.get("bytes", "")).startswith("form")
        headers["Content-Type"] = (
            "multipart/form-data; boundary=b" if is_form else "application/json"
        )
    for name, value in (case.get("headers") or {}).items():
        if value is None:
            del headers[name]
        else:
            headers[name] = world.words(value)
    return method, path, {**options, "headers": headers}


def content_of(world: World, case: dict[str, Any]) -> Any:
    """The body of a case that is no form."""
    if "change" in case:
        body = world.valid(case["send"]) | world.words(case["change"])
        kept = {key: value for key, value in body.items() if value != "<absent>"}
        return json.dumps(kept).encode()
    if "split" in case:
        shares = dict(
            zip((world.ids["dep_own"], world.ids["dep_other"]), case["split"], strict=True)
        )
        name = {"name": "new"} if case["send"].startswith("POST") else {}
        return json.dumps(split(shares, **name)).encode()
    if "bytes" in case:
        body = BODIES[case["bytes"]]
        return body() if callable(body) else body
    return world.words(case["body"]).encode() if "body" in case else None


def form_of(world: World, case: dict[str, Any]) -> dict[str, Any]:
    fields = {"name": "new", "format": "instruction"} | world.words(case["form"])
    if case["send"].endswith("validate"):
        del fields["name"]
    data = {key: value for key, value in fields.items() if value != "<absent>"}
    if fields.get("file") == "<absent>":
        return {"files": {key: (None, value) for key, value in data.items()}}
    name = case.get("file", "good")
    media = "text/html" if name == "html" else "application/jsonl"
    part = ("file", ("../../x", FILES.get(name, GOOD), media))
    return {"data": data, "files": [part, part] if name == "two" else [part]}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{area}: {case['case']}")
        for area, cases in CASES.items()
        for case in cases
    ],
)
def test_a_bad_input_is_refused_as_written(world: World, case: dict[str, Any]) -> None:
    before = world.state()
    method, path, options = request_of(world, case)
    answer = world.service.call(method, path, None, **options)
    assert (answer.status_code, _error(answer)["code"]) == tuple(case["want"]), answer.text
    check_shape(world, answer)
    check_advice(answer, case)
    if "param" in case:
        assert _error(answer)["param"] == case["param"]
    if "line" in case:
        assert _error(answer)["details"][0]["line"] == case["line"]
    for text in sent_texts(world.words(case.get("change") or case.get("form"))):
        assert text not in answer.text
    if "like" in case:
        other = request_of(world, case | {"send": case["like"]})
        assert anonymous(world.service.call(other[0], other[1], None, **other[2])) == anonymous(
            answer
        )
    assert world.state() == before
    assert world.service.call("GET", "/v1/models").status_code == 200


def _error(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["error"]


def anonymous(answer: httpx.Response) -> dict[str, Any]:
    return {**_error(answer), "request_id": None}


def sent_texts(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*(sent_texts(one) for one in value.values()))
    if isinstance(value, list):
        return set().union(*(sent_texts(one) for one in value))
    return {value[:40]} if isinstance(value, str) and len(value) > 3 else set()


def check_shape(world: World, answer: httpx.Response) -> None:
    error = _error(answer)
    assert set(answer.json()) == {"error"}
    assert set(error) == {"code", "message", "type", "param", "details", "request_id"}
    assert error["type"] == error["code"]
    assert all({"field", "code", "message"} <= set(one) for one in error["details"])
    assert answer.headers["content-type"].startswith("application/json")
    identifier = answer.headers["x-request-id"]
    assert re.fullmatch(r"req_[0-9a-z]{24}", identifier)
    assert identifier == error["request_id"]
    assert any(identifier in line for line in world.service.log.texts)
    leaks = (str(world.service.settings.data_dir), "SELECT", "Traceback", "sqlalchemy", "pydantic")
    assert not any(leak in answer.text for leak in leaks)


def check_advice(answer: httpx.Response, case: dict[str, Any]) -> None:
    headers, status, code = answer.headers, answer.status_code, _error(answer)["code"]
    assert headers["x-should-retry"] == ("true" if case.get("retry") else "false")
    if code == "rate_limit_exceeded" or status == 503:
        assert 1 <= int(headers["retry-after"]) <= 120
    else:
        assert "retry-after" not in headers
    assert ("www-authenticate" in headers) == (status == 401)
    assert ("allow" in headers) == (status == 405)
    # An unreadable frame is refused before anybody asks whose it is.
    is_framing = status in (414, 431) or ("given twice" in answer.text and "length" in answer.text)
    limits = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
    assert (limits <= set(headers)) == (status != 401 and not is_framing)
