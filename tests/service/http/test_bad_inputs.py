"""Every case of `bad_inputs.yaml` is answered as it says, and changes nothing."""

import gzip
import io
import json
import re
import tarfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.models.conversion import ADAPTER, ARCHIVE
from tests.support.objects.files import tar_of
from tests.support.service.in_process import LINES, jsonl, split
from tests.support.service.world import LINE, TURNS, World

CASES: dict[str, list[dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("bad_inputs.yaml").read_text()
)
GOOD = jsonl(*LINES)


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
    "deep": b"[" * 50_000,
    "form_cut": _form(*FORM, end="")[:-60],
    "form_cut_at_end": _form(*FORM, end="\r\n--b"),
    "form_nameless": _form('filename="x"\r\n\r\nx', *FORM),
    "form_name_twice": _form('name="name"\r\n\r\ny', *FORM),
    "form_not_utf8": _form(*FORM).replace(b"\r\n\r\nx\r\n", b"\r\n\r\n\xff\r\n", 1),
    "form_of_1001": _form(*(f'name="p{number}"\r\n\r\nx' for number in range(1001))),
}


def _talk(*turns: dict[str, Any]) -> bytes:
    return jsonl({"messages": [{"role": "user", "content": "a"}, *turns]})


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
    "deep": LINE
    + b'{"instruction":"a","response":"b","metadata":'
    + b'{"a":' * 32
    + b"1"
    + b"}" * 33,
    "two_marks": b"\xef\xbb\xbf" * 2 + LINE,
    "metadata": b'{"instruction":"a","response":"b","metadata":"c"}\n',
    "surrogate": b'{"instruction":"\\ud800","response":"b"}\n',
    "zip": b"PK\x03\x04" + LINE,
    "tools": jsonl({**TURNS, "tools": "none"}),
    "weight": _talk({"role": "assistant", "content": "b", "weight": 2}),
    "weightless": _talk({"role": "assistant", "content": "b", "weight": 0}),
    "role": _talk({"role": "robot", "content": "b"}),
    "late_system": _talk({"role": "system", "content": "b"}, {"role": "assistant", "content": "b"}),
    "no_user": jsonl({"messages": [{"role": "assistant", "content": "b"}]}),
    "no_answer": _talk({"role": "tool", "content": "b"}),
    "no_turns": jsonl({"messages": []}),
}


def _adapter(**changed: bytes | None) -> bytes:
    """The archive of an adapter with other files; None takes one away."""
    files = ADAPTER | {f"adapter_{name}": content for name, content in changed.items()}
    return tar_of({name: content for name, content in files.items() if content is not None})


def _with_link(name: str) -> bytes:
    """An archive in which one file is a link to a file of the machine that reads it."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return whole.getvalue()


ARCHIVES = {
    "no_tar": b"x" * 2000,
    "empty_tar": b"",
    "gzip_tar": gzip.compress(ARCHIVE),
    "cut_tar": ARCHIVE[:1800],
    "weightless": _adapter(**{"model.safetensors": None}),
    "no_configuration": _adapter(**{"config.json": None}),
    "pickle": _adapter(**{"model.safetensors": None, "model.bin": b"\x80"}),
    "weights_twice": tar_of({**ADAPTER, "again/adapter_model.safetensors": b"x"}),
    "linked_weights": _with_link("adapter_model.safetensors"),
    "configuration_of_lists": _adapter(**{"config.json": b"[[]]"}),
    "configuration_not_utf8": _adapter(**{"config.json": b"\xff"}),
    "broken_template": tar_of({**ADAPTER, "chat_template.jinja": b"{% for"}),
    "nameless": _adapter(**{"config.json": b"{}"}),
    "another_base": _adapter(**{"config.json": b'{"base_model_name_or_path":"../../etc"}'}),
}


LIMITS = {"x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset"}
# Words that messages use by themselves, for any request.
OWN_WORDS = {"level", "object", "other", "user"}
pytestmark = pytest.mark.both_databases(postgres="soak")


def request_of(world: World, case: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The method, path and httpx options of a case."""
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
    """The body of a case that is not a form."""
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
    if "body" not in case:
        return None
    text = world.words(case["body"]).encode()
    return re.sub(rb"<byte (..)>", lambda found: bytes.fromhex(found[1].decode()), text)


def form_of(world: World, case: dict[str, Any]) -> dict[str, Any]:
    is_import = case["send"] == "POST /v1/models"
    smallest = {"name": "new"} if is_import else {"name": "new", "format": "instruction"}
    fields = smallest | world.words(case["form"])
    if case["send"].endswith("validate"):
        del fields["name"]
    data = {key: value for key, value in fields.items() if value != "<absent>"}
    if fields.get("file") == "<absent>":
        return {"files": {key: (None, value) for key, value in data.items()}}
    name = case.get("file", "good")
    content = ARCHIVES.get(name, ARCHIVE) if is_import else FILES.get(name, GOOD)
    own_media = "application/x-tar" if is_import else "application/jsonl"
    part = ("file", ("../../x", content, "text/html" if name == "html" else own_media))
    return {"data": data, "files": [part, part] if name == "two" else [part]}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{area}: {case['case']}")
        for area, cases in CASES.items()
        for case in cases
    ],
)
def test_a_bad_input_is_refused_as_written(
    world: World, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneship.host.machine.GPU_FOLDER", Path("/nowhere"))
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
    identifier = answer.headers["x-request-id"]  # it is random and could contain any text
    outputs = [one.replace(identifier, "") for one in (answer.text, *lines_of(world, answer))]
    for text in sent_texts(world, case, path, options):
        assert not any(text in one for one in outputs), text
    if "says" in case:
        assert re.search(case["says"], _error(answer)["message"])
    if "like" in case:
        other = request_of(world, case | {"send": case["like"]})
        assert anonymous(world.service.call(other[0], other[1], None, **other[2])) == anonymous(
            answer
        )
    assert world.state() == before
    good = world.service.call("GET", "/v1/models")
    assert good.status_code == 200
    assert lines_of(world, good)
    assert set(good.headers) >= LIMITS


def _error(answer: httpx.Response) -> dict[str, Any]:
    return answer.json()["error"]


def anonymous(answer: httpx.Response) -> dict[str, Any]:
    return {**_error(answer), "request_id": None}


def sent_texts(world: World, case: dict[str, Any], path: str, options: dict[str, Any]) -> set[str]:
    """The texts that no answer and no log line may hold: values of the body, the form and the query."""
    values = [world.words(case.get("change") or case.get("form"))]
    with suppress(KeyError, RecursionError, TypeError, ValueError):
        values.append(json.loads(options["content"]))
    values += [value for _, value in httpx.URL(path).params.multi_items()]
    return set().union(*map(texts_in, values)) - OWN_WORDS


def texts_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set().union(*(texts_in(one) for one in value.values()))
    if isinstance(value, list):
        return set().union(*(texts_in(one) for one in value))
    return {value[:40]} if isinstance(value, str) and len(value) > 3 else set()


def lines_of(world: World, answer: httpx.Response) -> list[str]:
    """The log lines about a request."""
    identifier = answer.headers["x-request-id"]
    return [line for line in world.service.log.texts if identifier in line]


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
    assert lines_of(world, answer)
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
    # A request that cannot be parsed is refused before its tenant is known.
    is_framing = status in (414, 431) or ("given twice" in answer.text and "length" in answer.text)
    assert (set(headers) >= LIMITS) == (not is_framing)
