"""Programs of the `openai` package upload, tune, follow their job and read its results."""

import base64
import io
import json
from typing import Any

import httpx
import openai
import pytest

from tests.support.openai.openai_clients import bare_headers, blocking
from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.contract.openai.ids import result_file_of
from tuneship.service.models.hyperparameters import usual_rate
from tuneship.service.openai import result_files
from tuneship.store.records import job_records

pytestmark = pytest.mark.both_databases(postgres="soak")

SECRET = "zq planted text 7731"
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"case {number}"},
            {"role": "assistant", "content": "chapter"},
        ]
    }
    for number in range(4)
]


def upload(client: openai.OpenAI, *lines: Any, name: str = "train set.jsonl") -> Any:
    content = jsonl(*(lines or TALKS))
    return client.files.create(file=(name, io.BytesIO(content)), purpose="fine-tune")


def test_a_file_is_a_dataset(client: openai.OpenAI, answering: Service) -> None:
    made = upload(client)
    assert (made.object, made.purpose, made.status) == ("file", "fine-tune", "processed")
    assert made.filename == "train set.jsonl"
    assert made.bytes == len(jsonl(*TALKS))
    assert client.files.retrieve(made.id) == made
    assert made.id in {one.id for one in client.files.list()}
    own = made.id.replace("file-", "ds_")
    assert client.files.retrieve(own).id == made.id
    stored = answering.call("GET", f"/v1/datasets/{own}").json()
    assert (stored["format"], stored["num_examples"]) == ("conversation", 4)
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made.id)


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\n\r\n \n", b"\xef\xbb\xbf\r\n\t", b" "])
@pytest.mark.parametrize(
    ("line", "layout"),
    [
        ({"prompt": "a", "completion": "b"}, "instruction"),
        ({"instruction": "a", "output": "b", "history": []}, "instruction"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "conversation"),
        ({"prompt": TALKS[0]["messages"][:1], "completion": "b"}, "conversation"),
    ],
)  # fmt: skip
def test_a_format_is_that_of_the_first_object_whatever_bytes_stand_before_it(
    client: openai.OpenAI, answering: Service, line: dict[str, Any], layout: str, start: bytes
) -> None:
    content = start + jsonl(line, line).replace(b"\n", b"\r\n")
    made = client.files.create(file=("x.jsonl", io.BytesIO(content)), purpose="fine-tune")
    stored = answering.call("GET", f"/v1/datasets/{made.id.replace('file-', 'ds_')}").json()
    assert (stored["format"], stored["num_examples"]) == (layout, 2)
    assert made.status_details == " ".join(stored["suggestions"])


def test_pages_of_files_go_on_behind_the_last_one_in_both_orders(client: openai.OpenAI) -> None:
    made = [upload(client).id for _ in range(3)]
    for order, expected in (("desc", made[::-1]), ("asc", made)):
        found = [one.id for one in client.files.list(limit=2, order=order) if one.id in made]
        assert found == expected
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.list(after="file-" + "0" * 24)
    assert caught.value.param == "after"


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [{"role": "user", "content": SECRET}]},
        {"prompt": SECRET},
        {"input": SECRET, "preferred_output": SECRET, "non_preferred_output": SECRET},
    ],
)
def test_a_bad_line_is_refused_with_its_place_and_not_its_text(
    client: openai.OpenAI, line: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        upload(client, line)
    assert caught.value.code == "invalid_file_format"
    assert SECRET not in json.dumps(caught.value.body)


def test_other_purposes_and_expiry_are_refused_by_name(client: openai.OpenAI) -> None:
    file = ("x.jsonl", jsonl(*LINES))
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=file, purpose="vision")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(
            file=file, purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "expires_after")


def test_a_job_from_the_upload_to_its_results(client: openai.OpenAI, answering: Service) -> None:
    training = upload(client, *LINES)
    job = client.fine_tuning.jobs.create(
        model="tuneship-tiny",
        training_file=training.id,
        suffix="notes",
        seed=7,
        metadata={"team": "skin"},
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {"n_epochs": 2, "learning_rate_multiplier": 0.5, "lora_rank": 4}
            },
        },
    )
    assert (job.status, job.organization_id, job.seed) == ("queued", "alice", 7)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.learning_rate_multiplier) == (2, 0.5)
    assert job.metadata == {"team": "skin"}
    assert job.user_provided_suffix == "notes"
    own = answering.call("GET", f"/v1/fine-tuning/jobs/{job.id.replace('ftjob-', 'ft_')}").json()
    rate = usual_rate(answering.parts.catalogue.default.parameters)
    assert own["hyperparameters"]["learning_rate"] == 0.5 * rate
    assert own["hyperparameters"]["lora_rank"] == 4

    trainer = answering.trainer_of(own["id"])
    trainer.start_of(2)
    trainer.step(1, 1.5)
    trainer.step(2, 1.25, evaluated=True)
    trainer.complete()
    answering.until(lambda: client.fine_tuning.jobs.retrieve(job.id).status == "succeeded")
    done = client.fine_tuning.jobs.retrieve(job.id)
    assert done.fine_tuned_model == f"ft:tuneship-tiny:notes:{job.id.removeprefix('ftjob-')}"
    assert done.finished_at is not None
    assert job.id in {one.id for one in client.fine_tuning.jobs.list(metadata={"team": "skin"})}
    assert job.id not in {one.id for one in client.fine_tuning.jobs.list(metadata={"team": "x"})}

    content = client.files.content(done.result_files[0]).text
    lines = base64.b64decode(content).decode().splitlines()
    assert lines == [
        "step,train_loss,train_accuracy,valid_loss,valid_mean_token_accuracy",
        "1,1.500000e+00,,,",
        "2,1.250000e+00,,1.250000e+00,5.000000e-01",
    ]
    assert client.files.retrieve(done.result_files[0]).bytes == len(content)
    listed = client.files.list(purpose="fine-tune-results")
    assert done.result_files[0] in {one.id for one in listed}
    _check_reports(client, done)


def test_a_list_of_results_makes_none_of_them_and_says_how_long_they_are(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = service.model()
    job = service.call("GET", f"/v1/models/{model}").json()["fine_tuning_job_id"]
    losses = [5e-324, 0.0, 1 / 3, 12345.678, float("inf")]
    names = ("training_loss", "validation_loss", "learning_rate", "epoch", "accuracy", "perplexity")
    steps = [
        {"step": number, "evaluated": number % 3 == 0, **dict.fromkeys(names, losses[number % 5])}
        for number in range(3, 1500)
    ]
    with service.database.write("alice") as connection:
        job_records.put_metrics(connection, job, steps)
    path, name = "/openai/v1/files", result_file_of(job)
    content = service.call("GET", f"{path}/{name}/content").text

    made: list[Any] = []
    monkeypatch.setattr(result_files, "csv_of", made.append)
    (listed,) = service.call("GET", f"{path}?purpose=fine-tune-results").json()["data"]
    assert listed == service.call("GET", f"{path}/{name}").json()
    assert (listed["id"], listed["bytes"]) == (name, len(content))
    assert made == []


def _check_reports(client: openai.OpenAI, done: Any) -> None:
    """Check the events, in one page and in pages of two, and the checkpoint of a job that has succeeded."""
    events = client.fine_tuning.jobs.list_events(done.id, limit=50).data
    messages = [event.message for event in events]
    assert messages[0] == "The job has successfully completed"
    assert messages[1] == f"New fine-tuned model created: {done.fine_tuned_model}"
    assert messages[-1] == f"Created fine-tuning job: {done.id}"
    assert "Fine-tuning job started" in messages
    measured = {e.data["step"]: e.data for e in events if e.type == "metrics"}  # type: ignore[index]
    assert set(measured) == {1, 2}
    assert "valid_loss" not in measured[1]
    assert measured[2]["valid_loss"] == 1.25
    paged = [event.id for event in client.fine_tuning.jobs.list_events(done.id, limit=2)]
    assert paged == [event.id for event in events]
    assert len(set(paged)) == len(paged)

    checkpoint = client.fine_tuning.jobs.checkpoints.list(done.id).data[0]
    assert checkpoint.step_number == 2
    assert checkpoint.fine_tuned_model_checkpoint == f"{done.fine_tuned_model}:ckpt-step-2"
    assert done.fine_tuned_model in {model.id for model in client.models.list()}
    five_parts = done.fine_tuned_model.replace("tiny:", "tiny:alice:")
    assert client.models.retrieve(five_parts).id == done.fine_tuned_model
    assert client.models.delete(done.fine_tuned_model).deleted


def test_a_cancelled_and_a_failed_job(client: openai.OpenAI, answering: Service) -> None:
    training = upload(client)
    job = client.fine_tuning.jobs.create(model="tuneship-tiny", training_file=training.id)
    assert job.user_provided_suffix is None
    assert job.hyperparameters.learning_rate_multiplier == 1
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError) as caught:
        client.fine_tuning.jobs.pause(job.id)
    assert caught.value.code == "unsupported_operation"
    answering.until(lambda: answering.job_status(job.id.replace("ftjob-", "ft_")) == "cancelled")
    with pytest.raises(openai.ConflictError):
        client.fine_tuning.jobs.cancel(job.id)


JOB: dict[str, Any] = {"model": "tuneship-tiny"}
BAD_JOBS: list[tuple[dict[str, Any], int, str, str | None]] = [
    ({"model": "gpt-4o-mini-2024-07-18"}, 404, "model_not_found", "model"),
    ({"model": "ft:tuneship-tiny:notes:0123"}, 422, "invalid_value", "model"),
    ({"training_file": "file-" + "0" * 24}, 404, "not_found", "training_file"),
    ({"training_file": SECRET}, 422, "invalid_value", "training_file"),
    ({"method": {"type": "dpo"}}, 422, "invalid_value", "method.type"),
    ({"method": {"type": "supervised", "dpo": {}}}, 422, "unsupported_parameter", "method.dpo"),
    ({"integrations": [{"type": "wandb"}]}, 422, "unsupported_value", "integrations"),
    ({"hyperparameters": {"n_epochs": 0}}, 422, "invalid_value", "hyperparameters.n_epochs"),
    ({"hyperparameters": {"lora_rank": 9999}}, 422, "invalid_value", "hyperparameters.lora_rank"),
    ({"hyperparameters": {SECRET: 1}}, 422, "unknown_parameter", "hyperparameters"),
    (
        {"hyperparameters": {"learning_rate_multiplier": 1e9}},
        422,
        "invalid_value",
        "hyperparameters.learning_rate_multiplier",
    ),
    ({"seed": -1}, 422, "invalid_value", "seed"),
    ({"suffix": SECRET * 9}, 422, "invalid_value", "suffix"),
    ({"metadata": {"k": SECRET * 99}}, 422, "invalid_value", "metadata"),
    ({"n_epochs": 3}, 422, "unknown_parameter", "n_epochs"),
]


@pytest.mark.parametrize(("fields", "status", "code", "param"), BAD_JOBS)
def test_a_job_that_waiting_does_not_cure_is_never_a_400(
    answering: Service, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    if "training_file" not in fields:
        fields = {"training_file": answering.dataset().replace("ds_", "file-"), **fields}
    url = f"{answering.url}/openai/v1/fine_tuning/jobs"
    answer = httpx.post(url, json=JOB | fields, headers=bare_headers(answering))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), answer.text
    assert SECRET not in answer.text


def test_a_request_that_the_client_repeats_makes_one_job(answering: Service) -> None:
    url = f"{answering.url}/openai/v1/fine_tuning/jobs"
    body = JOB | {"training_file": answering.dataset(), "suffix": "repeated"}

    def sent(count: int, **more: str) -> httpx.Response:
        headers = {**bare_headers(answering), "x-stainless-retry-count": str(count), **more}
        return httpx.post(url, json=body, headers=headers)

    first = sent(0)
    assert first.status_code == 200, first.text
    again = [sent(1), sent(2)]
    assert {one.json()["id"] for one in again} == {first.json()["id"]}
    assert again[0].headers["idempotent-replayed"] == "true"
    # The same request, sent by somebody who means it, is another job.
    second = sent(0)
    assert second.json()["id"] != first.json()["id"]
    assert sent(1).json()["id"] == second.json()["id"]
    key = {"Idempotency-Key": "mine"}
    assert sent(0, **key).json()["id"] == sent(0, **key).json()["id"]


def test_another_tenant_sees_no_file_and_no_job(client: openai.OpenAI, answering: Service) -> None:
    file = upload(client)
    job = client.fine_tuning.jobs.create(model="tuneship-tiny", training_file=file.id)
    with blocking(answering, "bob") as bob:
        for call in (
            lambda: bob.files.retrieve(file.id),
            lambda: bob.files.delete(file.id),
            lambda: bob.files.content(file.id),
            lambda: bob.fine_tuning.jobs.retrieve(job.id),
            lambda: bob.fine_tuning.jobs.cancel(job.id),
            lambda: bob.fine_tuning.jobs.list_events(job.id),
            lambda: bob.fine_tuning.jobs.checkpoints.list(job.id),
            lambda: bob.fine_tuning.jobs.create(model="tuneship-tiny", training_file=file.id),
            lambda: bob.files.retrieve(job.id.replace("ftjob-", "file-res-")),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert file.id not in {one.id for one in bob.files.list()}
        assert job.id not in {one.id for one in bob.fine_tuning.jobs.list()}
    with pytest.raises(openai.PermissionDeniedError):
        client.files.content(file.id)
    client.fine_tuning.jobs.cancel(job.id)


def test_the_audit_chain_names_the_operation_and_the_resource(
    client: openai.OpenAI, answering: Service
) -> None:
    file = upload(client)
    client.files.delete(file.id)
    own = file.id.replace("file-", "ds_")
    entries: list[Any] = []
    after = None
    while True:
        page = answering.call("GET", "/v1/audit", params={"after": after} if after else {}).json()
        entries += page["entries"]
        if not page["entries"]:
            break
        after = page["pagination"]["after"]
    found = [one["action"] for one in entries if one["resource_id"] == own]
    assert found == ["openai_create_file", "openai_delete_file"]
