"""An adapter from elsewhere becomes a tuned model like any other, or is refused in a sentence and leaves nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.models.conversion import ADAPTER, ARCHIVE
from tests.support.objects.files import tar_of
from tests.support.service.in_process import Service
from tuneship.contract.models import ModelImport
from tuneship.conversion.order import ImportOrder, ImportReport
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.store.database import tables
from tuneship.store.files.quarantine import objects_of

TINY = SHIPPED / "tuneship-tiny"


def send(service: Service, archive: bytes = ARCHIVE, **form: Any) -> httpx.Response:
    return service.call(
        "POST", "/v1/models", data=form, files={"file": ("a.tar", archive, "application/x-tar")}
    )


def state(service: Service) -> tuple[int, list[str], list[str]]:
    """The number of models, and the files of models and of unfinished work."""
    root = service.settings.data_dir
    with service.database.read() as connection:
        count = connection.scalar(sa.select(sa.func.count()).select_from(tables.models)) or 0
    stored = [str(path) for path in (root / "blobs").glob("models/*")]
    return count, stored, [path.name for path in (root / "scratch").iterdir()]


@pytest.mark.both_databases
def test_an_imported_adapter_is_a_tuned_model_that_serves_and_survives_a_restart(
    service: Service,
) -> None:
    answer = send(service, name="elsewhere", tags=json.dumps({"team": "x"}))
    assert answer.status_code == 201, answer.text
    made = answer.json()
    assert made["id"].startswith("ft:tuneship-tiny:elsewhere:")
    assert answer.headers["location"] == f"/v1/models/{made['id']}"
    assert (made["fine_tuning_job_id"], made["base_model"]) == (None, "tuneship-tiny")
    assert service.call("GET", answer.headers["location"]).json() == made
    assert made["id"] in service.call("GET", "/v1/models").text
    assert service.deployment("serves", model_name=made["id"])
    with service.database.read() as connection:
        blob = connection.scalars(sa.select(tables.models.c.blob)).one()
        assert blob in objects_of(connection), "a restart would set its files aside"
    weights = service.settings.data_dir / "blobs" / blob / "adapter_model.safetensors"
    assert b"weights" not in weights.read_bytes()
    assert service.call("DELETE", answer.headers["location"]).status_code == 409


def test_the_adapter_is_checked_with_its_base_and_gets_the_base_models_template(
    service: Service,
) -> None:
    assert send(service, base_model="tuneship-tiny").status_code == 201
    (order,) = service.conversion.orders
    assert isinstance(order, ImportOrder)
    assert order.base_model == "tuneship-tiny"
    assert order.bases["tuneship-tiny"].endswith("tuneship-tiny")
    with service.database.read() as connection:
        files = connection.scalars(sa.select(tables.models.c.sha256)).one()
    assert set(files) == {*ADAPTER, "chat_template.jinja", "special_tokens_map.json", "parity.json"}


def test_only_the_named_base_model_is_read_and_an_adapter_for_another_one_is_refused(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    file, other = tmp_path / "models.yaml", shutil.copytree(TINY, tmp_path / "other")
    file.write_text("models: [{id: other, path: other}]")
    service = start(model_catalogue=file)
    assert send(service).status_code == 201
    assert set(service.conversion.readable) == {TINY, other}
    answer = send(service, base_model="other")
    assert answer.status_code == 400
    assert "was trained for the base model tuneship-tiny" in answer.json()["error"]["message"]
    assert service.conversion.readable == [other]


def without(name: str) -> bytes:
    return tar_of({one: content for one, content in ADAPTER.items() if one != name})


WEIGHTS = "adapter_model.safetensors"
UNNAMED = tar_of({**ADAPTER, "adapter_config.json": b"{}"})
BAD_ARCHIVES = {
    "no tar": (b"x" * 2000, "is cut or no tar archive"),
    "empty": (b"", "is cut or no tar archive"),
    "cut": (ARCHIVE[:1800], "is cut or no tar archive"),
    "no weights": (without(WEIGHTS), f"has no {WEIGHTS}"),
    "no configuration": (without("adapter_config.json"), "has no adapter_config.json"),
    "pickle": (
        tar_of({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80"}),
        "has its weights as a pickle only",
    ),
    "twice": (tar_of({**ADAPTER, f"again/{WEIGHTS}": b"x"}), f"has more than one {WEIGHTS}"),
    "no object": (tar_of({**ADAPTER, "adapter_config.json": b"["}), "its adapter_config.json is damaged"),
    "template": (tar_of({**ADAPTER, "chat_template.jinja": b"{% for"}), "has a chat template of its own"),
    "template: bytes": (tar_of({**ADAPTER, "chat_template.jinja": b"\xff"}), "has a chat template that cannot be read"),
    "nameless": (UNNAMED, "base_model is needed"),
}  # fmt: skip


@pytest.mark.parametrize(("archive", "why"), BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_a_bad_archive_is_refused_in_a_sentence_and_leaves_nothing(
    service: Service, archive: bytes, why: str
) -> None:
    before = state(service)
    answer = send(service, archive)
    assert answer.status_code == 400, answer.text
    assert why in answer.json()["error"]["message"]
    assert state(service) == before


def test_an_adapter_that_cannot_be_served_is_refused_and_leaves_nothing(service: Service) -> None:
    service.conversion.report = ImportReport(
        fault="cannot be served: tensor x holds values that are not finite"
    )
    before = state(service)
    answer = send(service)
    message = "the adapter cannot be served: tensor x holds values that are not finite"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    assert state(service) == before


def test_an_unknown_base_model_and_a_wrong_media_type_are_refused(service: Service) -> None:
    answer = send(service, base_model="no-such")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    file = ("a.jsonl", ARCHIVE, "application/jsonl")
    answer = service.call("POST", "/v1/models", files={"file": file}, data={"name": "m"})
    assert answer.status_code == 422
    assert "application/x-tar" in answer.json()["error"]["message"]


def test_the_client_sends_a_folder_and_downloads_into_one(service: Service, tmp_path: Path) -> None:
    service.listen()
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in ADAPTER.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("is not sent")

    received: list[tuple[int, int]] = []

    async def in_and_out() -> Path:
        async with service.client() as client:
            made = await client.models.import_(ModelImport(name="sent"), folder)
            watched = client.with_options(progress=lambda *sizes: received.append(sizes))
            return await watched.models.download(tmp_path / "out", made.id, format="merged")

    target = service.run(in_and_out())
    assert received[-1][0] == received[-1][1] > 0
    assert {file.name for file in target.iterdir()} == {"README.md", "model_card.json", "weights"}
