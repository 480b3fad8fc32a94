"""A tuned model is handed out as an archive that was compared, to whoever may have it, and nothing of it stays."""

import asyncio
import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tests.support.waiting import until
from tuneship.contract.model_card import ModelCard
from tuneship.conversion.order import ExportOrder, ExportReport
from tuneship.host.staging import staged
from tuneship.service.models.content import remove_unfinished
from tuneship.service.models.exports import EXPORTING
from tuneship.store.database import tables


def content(service: Service, model: str, client: str = "alice", **query: Any) -> httpx.Response:
    return service.call("GET", f"/v1/models/{model}/content", client, params=query)


def files_in(answer: httpx.Response) -> dict[str, bytes]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-tar"
    assert int(answer.headers["content-length"]) == len(answer.content)
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        for entry in archive:
            opened = archive.extractfile(entry)
            assert opened is not None
            found[entry.name] = opened.read()
    return found


def left_over(service: Service) -> list[str]:
    scratch = service.settings.data_dir / "scratch"
    return [path.name for path in scratch.iterdir() if path.name.startswith(EXPORTING)]


def refusal(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


def test_an_export_is_an_archive_with_a_card_and_nothing_of_it_stays(service: Service) -> None:
    model = service.model()
    files = files_in(content(service, model, format="gguf", gguf_type="q8_0"))
    name = f"{model.split(':')[2]}-gguf"
    assert set(files) == {f"{name}/{one}" for one in ("README.md", "model_card.json", "weights")}
    assert files[f"{name}/weights"] == b"exported"
    card = files[f"{name}/README.md"].decode()
    for said in (
        model,
        'base_model: "tuneship-tiny"',
        "license: ",
        "lora_rank",
        "| training | ds_",
        "**0 of 31 HTI-1 source attributes stated**",
        "| SHA-256 of the base's model.safetensors |",
        "over fixed texts the logits differ by",
        hashlib.sha256(files[f"{name}/model_card.json"]).hexdigest(),
    ):
        assert said in card
    assert ModelCard.model_validate_json(files[f"{name}/model_card.json"]).model.id == model
    (order,) = service.conversion.orders
    assert isinstance(order, ExportOrder)
    assert (order.format, order.gguf_type, order.base_name) == ("gguf", "q8_0", "tuneship-tiny")
    assert left_over(service) == []


def test_the_card_of_a_model_whose_data_is_deleted_says_so(service: Service) -> None:
    model = service.model()
    with service.database.write() as connection:
        connection.execute(sa.delete(tables.datasets))
    card = next(
        text for name, text in files_in(content(service, model)).items() if "README" in name
    )
    assert "| not known | not known | not known |" in card.decode()


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (ExportReport(fault="its tokenizer is strange"), "the model cannot be exported: its tokenizer is strange"),
        (ExportReport(difference=0.5, allowed=0.1), "logits differ by 0.5 of their spread, 0.1 is allowed"),
        (ExportReport(difference=float("nan"), allowed=0.1), "the export answers otherwise than the model"),
    ],
    ids=("refused", "different", "not a number"),
)  # fmt: skip
def test_an_export_that_is_not_as_the_model_is_handed_to_nobody(
    service: Service, report: ExportReport, why: str
) -> None:
    service.conversion.report = report
    status, message = refusal(content(service, service.model()))
    assert status == 409
    assert why in message
    assert left_over(service) == []


def test_a_base_model_and_a_model_without_its_base_are_not_exported(service: Service) -> None:
    assert refusal(content(service, "tuneship-tiny")) == (
        409,
        "a base model is not exported: its owner has it",
    )
    model = service.model()
    with service.database.write() as connection:
        connection.execute(sa.update(tables.models).values(base_model="gone"))
    status, message = refusal(content(service, model))
    assert status == 409
    assert "its base model gone is not on this machine" in message


def test_a_format_that_does_not_exist_is_refused_by_name(service: Service) -> None:
    for query in ({"format": "onnx"}, {"gguf_type": "q4_0"}):
        answer = content(service, service.model(), **query)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["param"] == next(iter(query))


def make_hipaa(service: Service) -> None:
    """Put all jobs into hipaa mode, as far as an export looks at it."""
    with service.database.write() as connection:
        for row in connection.execute(sa.select(tables.jobs)).mappings().all():
            settings = {**row["security_settings"], "compliance_mode": "hipaa"}
            change = sa.update(tables.jobs).where(tables.jobs.c.id == row["id"])
            connection.execute(change.values(security_settings=settings))


@pytest.mark.parametrize("is_allowed", [False, True])
def test_a_hipaa_model_is_handed_out_only_where_the_operator_allows_it(
    tmp_path: Path, is_allowed: bool
) -> None:
    with Service(tmp_path, export_hipaa_models=is_allowed) as service:
        model = service.model()
        make_hipaa(service)
        service.come_over_tls()
        answer = content(service, model)
        if is_allowed:
            assert files_in(answer)
        else:
            status, message = refusal(answer)
            assert status == 403
            assert "TUNESHIP_EXPORT_HIPAA_MODELS" in message


def test_the_audit_chain_names_who_exported_a_model(service: Service) -> None:
    model = service.model()
    content(service, model)
    content(service, "tuneship-tiny")
    with service.database.read() as connection:
        query = sa.select(tables.audit).where(tables.audit.c.action == "get_model_content")
        found = [
            (row["status"], row["resource_id"]) for row in connection.execute(query).mappings()
        ]
    assert found == [(200, model), (409, None)]


def test_a_disconnect_ends_the_export_and_leaves_nothing(service: Service) -> None:
    model = service.model()
    service.conversion.waits = True
    service.listen()

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            path = f"{service.url}/v1/models/{model}/content"
            asking = asyncio.create_task(client.get(path, headers=service.headers["alice"]))
            await asyncio.to_thread(until, lambda: bool(service.conversion.orders))
            second = await client.get(path, headers=service.headers["alice"])
            assert second.status_code == 429
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    service.until(lambda: left_over(service) == [])
    service.conversion.waits = False
    service.until(lambda: content(service, model).status_code == 200)


def test_exports_of_a_killed_service_are_removed_and_running_ones_are_not(tmp_path: Path) -> None:
    killed = tmp_path / f"{EXPORTING}killed"
    killed.mkdir()
    (killed / "weights").write_text("plain")
    with staged(tmp_path, EXPORTING, lambda _: None) as stage:
        remove_unfinished(tmp_path)
        assert list(tmp_path.iterdir()) == [stage]
