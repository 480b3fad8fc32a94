"""An import brings weights and numbers, no programs: what else it holds costs its sender alone, and not for long."""

import asyncio
import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from safetensors.numpy import load_file, save_file

from tests.service.models.test_imports import send, state
from tests.support.models.conversion import ADAPTER, ARCHIVE
from tests.support.objects.files import tar_of
from tests.support.service.in_process import LINES, Service, jsonl
from tests.support.waiting import until
from tuneship.contract.declaring.limits import MAX_LORA_RANK
from tuneship.conversion.order import ImportReport
from tuneship.conversion.received_adapter import (
    MAX_ENTRIES,
    MAX_EXTENSION_BYTES,
    AdapterFault,
    unpack,
)
from tuneship.conversion.running import ConversionFailed, ConversionLimits, convert_in_process
from tuneship.security.sealed_files import read_plain
from tuneship.service.context.context import Context
from tuneship.service.models import content, served_models
from tuneship.store.database import tables

Start = Callable[..., Service]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def message(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


# Templates, which are programs

LOOPS = "{% for a in range(100000) %}" * 3 + "{% endfor %}" * 3
BOMBS = {
    "power": "{% if 9**(9**9) % 7 %}{% endif %}",
    "text": "{{ 'a' * 10**10 }}",
    "loops": "{% if 'BOOM' in messages[-1].content %}" + LOOPS + "{% endif %}",
    "constant": "x" * 900_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_refused_with_the_way_to_have_it_added(
    service: Service, bomb: str, place: str
) -> None:
    before = state(service)
    own = bomb if place.endswith("jinja") else json.dumps({"chat_template": bomb})
    refusal = message(send(service, tar_of({**ADAPTER, place: own.encode()})))
    assert "has a chat template of its own" in refusal
    assert "have the base model added a second time with this template" in refusal
    assert state(service) == before


def test_all_that_is_stored_of_an_adapter_was_written_here(service: Service) -> None:
    brought = {"parity.json": b"[" * 10_000, "README.md": b"x", "special_tokens_map.json": b"{}"}
    assert send(service, tar_of({**ADAPTER, **brought})).status_code == 201
    with service.database.read() as connection:
        (row,) = connection.execute(sa.select(tables.models)).mappings()
    found = {name: opened(service, row, name) for name in row["sha256"]}
    assert json.loads(found["parity.json"]) == {"dtype": "float32", "probes": []}
    base = service.parts.catalogue.get("tuneship-tiny")
    assert base is not None
    assert found["chat_template.jinja"].decode() == base.text_format.template.source
    assert json.loads(found["special_tokens_map.json"]) == base.text_format.template.special_tokens


def opened(service: Service, row: Any, name: str) -> bytes:
    with service.database.read() as connection:
        key = service.parts.keyring.find(connection, row["client_id"], row["blob"])
    return read_plain(service.settings.data_dir / "blobs" / row["blob"] / name, key)


# Archives


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def settings(text: bytes) -> bytes:
    """An extended header with one setting in it."""
    return header(tarfile.XHDTYPE, len(text)) + text + bytes(-len(text) % 512)


def negative(kind: bytes) -> bytes:
    whole = bytearray(header(kind, 0))
    whole[124:136] = struct.pack(">Iq", 0xFFFFFFFF, -512)
    whole[148:156] = b" " * 8
    whole[148:156] = f"{sum(whole):06o}\0 ".encode()
    return bytes(whole)


LONG = MAX_EXTENSION_BYTES + 1
KINDS = {"x": b"x", "g": b"g", "X": b"X", "L": b"L", "K": b"K"}
HOSTILE: dict[str, tuple[bytes, str]] = {
    # The sizes are those of the headers alone: nothing of the files behind them is read.
    **{f"{name} header": (header(kind, 1 << 40), "a header of more than 4 KiB") for name, kind in KINDS.items()},
    # The regular expression of CVE-2024-6232 takes the square of the digits.
    "digits": (settings(b"9" * 80_000), "a header of more than 4 KiB"),
    "sparse": (header(tarfile.GNUTYPE_SPARSE, 0), "a sparse file"),
    "sparse settings": (settings(b"22 GNU.sparse.major=1\n"), "a sparse file"),
    "negative size": (negative(tarfile.REGTYPE), "no tar archive"),
    "a loop": (
        header(tarfile.REGTYPE, 0) + settings(b"14 size=-2000\n") + header(tarfile.REGTYPE, 0),
        "no tar archive|more than",
    ),
    "files": (header(tarfile.REGTYPE, 0) * (MAX_ENTRIES + 1), f"more than {MAX_ENTRIES} files"),
    "settings": (settings(b"6 a=b\n") * (MAX_ENTRIES + 1), "no tar archive"),
    "compressed": (gzip.compress(ARCHIVE), "no tar archive"),
    "link": (header(tarfile.SYMTYPE, 0, WEIGHTS), "is no plain file"),
    "device": (header(tarfile.CHRTYPE, 0, WEIGHTS), "is no plain file"),
    "large configuration": (header(tarfile.REGTYPE, 2 << 20, CONFIG), "is larger than 1 MiB"),
    "templates": (
        tar_of({f"additional_chat_templates/{n}.jinja": b"" for n in range(20)}),
        "more than 16 chat templates",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("archive", "why"), HOSTILE.values(), ids=HOSTILE)
def test_an_archive_is_bounded_before_a_library_reads_it(
    tmp_path: Path, archive: bytes, why: str
) -> None:
    file, folder = tmp_path / "a.tar", tmp_path / "folder"
    file.write_bytes(archive + bytes(1024))
    folder.mkdir()
    with pytest.raises(AdapterFault, match=why):
        unpack(file, folder)


def test_an_archive_of_todays_programs_is_unpacked(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.tar", tmp_path / "folder"
    folder.mkdir()
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(file, "w", format=kind) as archive:
            for name, content in ADAPTER.items():
                entry = tarfile.TarInfo("é" * 60 + f"/{name}")
                entry.size, entry.mtime = len(content), 1.5
                archive.addfile(entry, io.BytesIO(content))
        unpack(file, folder)
        found = {one.name: one.read_bytes() for one in folder.iterdir()}
        assert found == ADAPTER
        for name in found:
            (folder / name).unlink()


# Processes

ENDLESS = "while True: pass"
GREEDY = "print('begun', flush=True); kept = bytearray(1 << 30); print('kept')"
TALKATIVE = "import sys; print('x' * 10_000_000); open(sys.argv[2], 'w').write(' ' * 10_000_000)"


@pytest.mark.parametrize(
    ("program", "limits", "why"),
    [
        (ENDLESS, ConversionLimits(0.5), "took longer than"),
        (ENDLESS, ConversionLimits(60, is_stopped=lambda: True), "was stopped"),
        (GREEDY, ConversionLimits(60, 512 << 20), "crashed .*MemoryError"),
        (TALKATIVE, ConversionLimits(60), "crashed"),
    ],
    ids=("endless", "left", "greedy", "talkative"),
)
def test_a_process_that_reads_foreign_files_has_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    limits: ConversionLimits,
    why: str,
) -> None:
    code, work = tmp_path / "code", tmp_path / "work"
    code.mkdir()
    work.mkdir()
    (code / "hostile_reader.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(code), prepend=":")
    order = ImportReport()
    with pytest.raises(ConversionFailed, match=why) as failure:
        convert_in_process(order, ImportReport, work, (), limits, module="hostile_reader")
    assert len(str(failure.value)) < 1000


def test_imports_leave_the_uploads_of_others_alone_and_end_with_their_callers(
    service: Service,
) -> None:
    service.conversion.waits = True
    service.listen()
    senders = [f"tenant{number}" for number in range(4)]
    for name in (*senders, "fifth"):
        service.headers[name] = service.key_headers(name)
    form: dict[str, Any] = {"files": {"file": ("a.tar", ARCHIVE, "application/x-tar")}}

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            path = f"{service.url}/v1/models"
            asking = [
                asyncio.create_task(client.post(path, headers=service.headers[one], **form))
                for one in senders
            ]
            await asyncio.to_thread(until, lambda: len(service.conversion.orders) == len(senders))
            file = ("d.jsonl", jsonl(*LINES), "application/jsonl")
            uploaded = await client.post(
                f"{service.url}/v1/datasets",
                headers=service.headers["fifth"],
                data={"name": "d", "format": "instruction", "base_model": "tuneship-tiny"},
                files={"file": file},
            )
            assert uploaded.status_code == 201, uploaded.text
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(leave())
    service.until(lambda: state(service) == (0, [], []))
    service.until(lambda: service.parts.threads.conversions.is_idle)
    service.conversion.waits = False
    assert send(service).status_code == 201


def test_imports_count_against_the_bytes_of_their_client(start: Start) -> None:
    service = start(maximum_dataset_bytes=100_000)
    large = tar_of({**ADAPTER, WEIGHTS: b"x" * 60_000})
    assert send(service, large).status_code == 201
    before = state(service)
    answer = send(service, large)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
    assert state(service) == before
    file = {"file": ("d.jsonl", jsonl(*LINES) * 400, "application/jsonl")}
    form = {"name": "d", "format": "instruction", "base_model": "tuneship-tiny"}
    assert service.call("POST", "/v1/datasets", data=form, files=file).status_code == 429
    made = service.call("GET", "/v1/models?fine_tuned_only=true").json()["models"]
    service.call("DELETE", f"/v1/models/{made[0]['id']}")
    assert send(service, large).status_code == 201


def test_an_archive_larger_than_any_adapter_of_its_base_is_not_unpacked(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "OTHER_FILES_BYTES", -(1 << 40))
    for form in ({}, {"base_model": "tuneship-tiny"}):
        assert f"larger than one of rank {MAX_LORA_RANK}" in message(send(service, **form), 413)
    assert service.conversion.orders == []


def test_the_template_of_an_earlier_import_is_never_compiled(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = send(service).json()["id"]
    monkeypatch.setattr(served_models, "_template", None)
    assert service.deployment("serves", model_name=made)
    context = Context(service.parts, "alice", "req_1")
    with service.database.read() as connection:
        served = served_models.models_of(context).served(connection, "alice", made)
    assert served.template.source == served.base.text_format.template.source


def test_an_import_that_the_disk_has_no_room_for_is_refused(start: Start) -> None:
    service = start(minimum_free_disk_bytes=1 << 60)
    assert message(send(service), 503) == "the disk is nearly full"


# Real processes


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    from tests.support.models.random_adapters import random_adapter  # loads torch

    return random_adapter(tmp_path / "adapter", 1)


def archive_of(folder: Path, **options: Any) -> bytes:
    """The adapter's archive, with other options of peft."""
    config = json.loads((folder / CONFIG).read_text())
    names = {"base_model_name_or_path": "tuneship-tiny"}
    changed = json.dumps({**config, **names, **options})
    return tar_of({CONFIG: changed.encode(), WEIGHTS: (folder / WEIGHTS).read_bytes()})


@pytest.mark.slow
def test_regular_expressions_end_with_the_process_and_are_not_stored(
    service: Service, adapter: Path
) -> None:
    service.conversion.seconds = 15
    # Twice as long with each character of a module's name.
    bomb = {r"([\w.]+)+!": 1}
    assert "it took longer than 15 s" in message(
        send(service, archive_of(adapter, alpha_pattern=bomb))
    )
    service.conversion.seconds = 300
    answer = send(
        service, archive_of(adapter, target_modules=r".*_proj", alpha_pattern={r".*v_pro.": 3})
    )
    assert answer.status_code == 201, answer.text
    with service.database.read() as connection:
        (row,) = connection.execute(sa.select(tables.models)).mappings()
    config = json.loads(opened(service, row, CONFIG))
    modules = config["target_modules"]
    assert modules
    assert all(name.startswith("model.layers.") for name in modules)
    assert config["alpha_pattern"] == {name: 3 for name in modules if name.endswith("v_proj")}


@pytest.mark.slow
@pytest.mark.soak
def test_a_rank_beyond_that_of_jobs_is_refused(service: Service, adapter: Path) -> None:
    service.conversion.seconds = 300
    rank = MAX_LORA_RANK + 1
    tensors = load_file(adapter / WEIGHTS)
    for name, one in tensors.items():
        axis = 0 if "lora_A" in name else 1
        tensors[name] = np.ascontiguousarray(
            one.repeat(-(-rank // 4), axis).take(range(rank), axis)
        )
    save_file(tensors, adapter / WEIGHTS)
    refusal = message(send(service, archive_of(adapter, r=rank)))
    assert f"are of rank {rank}, and {MAX_LORA_RANK} is the most" in refusal
