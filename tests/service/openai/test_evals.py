"""Programs of the `openai` package define evals, run them on rows of their own, and read the scores."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa

from tests.support.openai.evals import (
    BAD_EVALS,
    BAD_RUNS,
    CONFIG,
    ENDS,
    NEAR,
    ROW,
    SAME,
    SCHEMA,
    SOURCE,
    defined,
    ended,
    items,
    source_of,
)
from tests.support.openai.openai_clients import bare_headers, blocking
from tests.support.service.evaluations import PlayedAnswers, right
from tests.support.service.in_process import Service, jsonl
from tuneship.service.background_requests.background_run import BackgroundTiming
from tuneship.store.database import tables


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedAnswers]:
    with Service(tmp_path_factory.mktemp("evals"), maximum_active_evaluations=1000) as service:
        service.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=25)
        made = PlayedAnswers(service).set_up()
        service.listen()
        yield made


@pytest.fixture(scope="module")
def client(played: PlayedAnswers) -> Iterator[openai.OpenAI]:
    # OpenAI's own answers have null where its types have an object: an error that there is not, an answer's usage.
    with blocking(played.service, _strict_response_validation=False) as made:
        yield made


def test_an_eval_from_its_definition_to_its_scores(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    played.tuned_fails = {3, 7}
    made = defined(client, SAME, NEAR)
    assert (made.object, made.name, made.metadata) == ("eval", "Chapters, November", {"site": "A"})
    assert made.data_source_config.schema_["properties"]["item"] == SCHEMA
    assert [one.to_dict() for one in made.testing_criteria] == [SAME, NEAR]
    file = client.files.create(file=("rows.jsonl", io.BytesIO(jsonl(*items(30)))), purpose="evals")
    assert file.purpose == "evals"
    sampling = {"temperature": 1.0, "top_p": 1.0, "seed": 42, "max_completion_tokens": 32}
    run = client.evals.runs.create(
        made.id,
        name="first try: tuned",
        data_source=source_of(
            played.candidate, {"type": "file_id", "id": file.id}, sampling_params=sampling
        ),
        metadata={"by": "night"},
    )
    assert run.status in ("queued", "in_progress", "completed")

    done = ended(client, played.service, run)

    assert (done.status, done.name, done.metadata) == (
        "completed",
        "first try: tuned",
        {"by": "night"},
    )
    assert done.result_counts.to_dict() == {"total": 30, "passed": 28, "failed": 2, "errored": 0}
    assert [one.to_dict() for one in done.per_testing_criteria_results] == [
        {"testing_criteria": SAME["name"], "passed": 28, "failed": 2},
        {"testing_criteria": NEAR["name"], "passed": 28, "failed": 2},
    ]
    (usage,) = done.per_model_usage
    assert (usage.invocation_count, usage.run_model_name.startswith("ft:")) == (30, True)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 30
    assert done.data_source.source.id == file.id
    assert done.data_source.sampling_params.to_dict() == sampling
    # The played model has been trained on first turns alone; it answers by the first number.
    asked = played.service.engines.asked[-1]
    assert (asked["temperature"], asked["top_p"], asked["seed"]) == (1.0, 1.0, 42)

    found = list(client.evals.runs.output_items.list(run.id, eval_id=made.id, limit=7))
    assert sorted(one.datasource_item_id for one in found) == list(range(30))
    failed = client.evals.runs.output_items.list(run.id, eval_id=made.id, status="fail")
    assert {one.datasource_item_id for one in failed} == {3, 7}
    for one in found:
        is_right = one.datasource_item_id not in (3, 7)
        assert one.status == ("pass" if is_right else "fail")
        assert [(r.name, r.passed, r.score) for r in one.results] == [
            (SAME["name"], is_right, float(is_right)),
            (NEAR["name"], is_right, float(is_right)),
        ]
        assert (one.sample.error, one.sample.output, one.datasource_item) == (None, [], {})
    last_first = client.evals.runs.output_items.list(run.id, eval_id=made.id, order="desc", limit=7)
    assert [one.id for one in last_first] == [one.id for one in reversed(found)]
    again = client.evals.runs.output_items.retrieve(found[4].id, eval_id=made.id, run_id=run.id)
    assert again.to_dict() == found[4].to_dict()

    # It is an evaluation of the main API, by which two runs of the same rows can be compared.
    shown = played.shown(run.id)
    assert shown["examples"]["scored"] == 30
    other = client.evals.runs.create(
        made.id,
        data_source=source_of(
            played.baseline, {"type": "file_id", "id": file.id}, sampling_params=sampling
        ),
    )
    assert ended(client, played.service, other).result_counts.passed == 30
    path = f"/v1/evaluations/{run.id}/comparison/{other.id}"
    (grader, _) = played.service.call("GET", path).json()["graders"]
    assert (grader["wins"], grader["losses"], grader["ties"]) == (0, 2, 28)
    # Not with one whose answers were sampled in another way.
    greedy = client.evals.runs.create(
        made.id,
        data_source=source_of(
            *(played.baseline, {"type": "file_id", "id": file.id}),
            sampling_params={"max_completion_tokens": 32},
        ),
    )
    path = f"/v1/evaluations/{run.id}/comparison/{greedy.id}"
    assert "sampling" in played.service.call("GET", path).json()["error"]["message"]


def test_evals_and_runs_are_listed_changed_cancelled_and_deleted(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    service = played.service
    made, other = defined(client), defined(client)
    listed = [one.id for one in client.evals.list(limit=1)]
    assert listed.index(made.id) < listed.index(other.id)
    newest_first = [one.id for one in client.evals.list(order="desc")]
    assert newest_first == listed[::-1]
    changed = client.evals.update(made.id, name="Chapters", metadata={"site": "B"})
    assert (changed.name, changed.metadata) == ("Chapters", {"site": "B"})
    assert client.evals.retrieve(made.id).to_dict() == changed.to_dict()

    datasets = datasets_of(service)
    runs = [
        client.evals.runs.create(made.id, data_source=source_of(played.baseline, items(3)))
        for _ in "ab"
    ]
    assert {ended(client, service, run).status for run in runs} == {"completed"}
    service.engines.may_answer.clear()
    waiting = client.evals.runs.create(
        made.id, data_source=source_of(played.baseline, items(3)), name="waits"
    )
    assert [one.id for one in client.evals.runs.list(made.id, limit=2)] == [
        *(run.id for run in runs),
        waiting.id,
    ]
    assert list(client.evals.runs.list(other.id)) == []
    with pytest.raises(openai.ConflictError):
        client.evals.delete(made.id)
    with pytest.raises(openai.ConflictError):
        client.evals.runs.delete(waiting.id, eval_id=made.id)
    cancelled = client.evals.runs.cancel(waiting.id, eval_id=made.id)
    service.engines.may_answer.set()
    assert (cancelled.status, cancelled.name) == ("canceled", "waits")
    (found,) = client.evals.runs.list(made.id, status="canceled")
    assert found.id == waiting.id

    deleted = client.evals.runs.delete(runs[0].id, eval_id=made.id)
    assert (deleted.deleted, deleted.run_id) == (True, runs[0].id)
    # A dataset that its owner has deleted before is not missed.
    gone = dataset_of(service, runs[1].id)
    assert datasets_of(service) - datasets == {gone, dataset_of(service, waiting.id)}
    assert service.call("DELETE", f"/v1/datasets/{gone}").status_code == 200
    # The main API deletes the rows of a run, too.
    again = client.evals.runs.create(made.id, data_source=source_of(played.baseline, items(3)))
    assert ended(client, service, again).status == "completed"
    rows = dataset_of(service, again.id)
    assert service.call("DELETE", f"/v1/evaluations/{again.id}").status_code == 200
    assert rows not in datasets_of(service)
    assert client.evals.delete(made.id).deleted
    assert datasets_of(service) == datasets
    for run in (runs[1], waiting):
        assert service.call("GET", f"/v1/evaluations/{run.id}").status_code == 404
    with pytest.raises(openai.NotFoundError):
        client.evals.retrieve(made.id)


def datasets_of(service: Service) -> set[str]:
    page = service.call("GET", "/v1/datasets?limit=100").json()
    return {one["id"] for one in page["datasets"]}


def dataset_of(service: Service, run_id: str) -> str:
    return service.call("GET", f"/v1/evaluations/{run_id}").json()["dataset_id"]


def test_a_prompt_may_be_the_turns_of_a_row_and_names_may_lie_deeper(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    played.tuned_fails = ()
    deep = SAME | {"reference": "{{item.patient.chapter}}"}
    turns = [{"role": "user", "content": "case 5?"}]
    item = {"question": "-", "turns": turns, "patient": {"chapter": right(5)}}
    # Of a row without the field, the criterion fails.
    rows = [{"item": item}, {"item": item | {"patient": {}}}]
    source = source_of(played.candidate, rows)
    source["type"] = "responses"
    source["input_messages"] = {"type": "item_reference", "item_reference": "item.turns"}
    made = defined(client, deep)
    run = client.evals.runs.create(made.id, data_source=source)
    done = ended(client, played.service, run)
    assert done.result_counts.to_dict() == {"total": 2, "passed": 1, "failed": 1, "errored": 0}


def test_a_model_is_asked_by_its_name_and_of_an_endpoint_the_larger_member(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    service, made = played.service, defined(client)
    split = [
        {"id": played.baseline, "traffic_percentage": 90},
        {"id": played.candidate, "traffic_percentage": 10},
    ]
    body = {"name": "gpt-4o-mini", "deployments": split}
    assert service.call("POST", "/v1/canary-endpoints", json=body).status_code == 201
    tuned = service.call("GET", "/v1/models?fine_tuned_only=true").json()["models"][0]["id"]
    for model, asked in (("gpt-4o-mini", played.baseline), (tuned, played.candidate)):
        run = client.evals.runs.create(made.id, data_source=source_of(model, items(2)))
        assert run.model == model
        assert played.shown(run.id)["candidate"] == asked
        assert ended(client, service, run).result_counts.passed == 2


def test_a_row_that_the_model_was_trained_on_has_an_error_and_no_score(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    service = played.service
    learnt = [{"instruction": f"case {n}?", "response": right(n)} for n in (9, 10)]
    trained = service.dataset(content=jsonl(*learnt))
    job = service.job(dataset_id=trained)
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.complete()
    service.until(lambda: service.job_status(job) == "completed")
    model = service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()["fine_tuned_model"]
    rows = [{"item": {"question": f"case {n}?", "chapter": right(n)}} for n in (8, 9)]
    made = defined(client)
    source = source_of(service.deployment("leaky", model_name=model), rows)
    question = {"role": "user", "content": "{{item.question}}"}
    source["input_messages"] = {"type": "template", "template": [question]}
    run = client.evals.runs.create(made.id, data_source=source)
    done = ended(client, service, run)
    assert done.result_counts.to_dict() == {"total": 2, "passed": 1, "failed": 0, "errored": 1}
    assert done.per_model_usage[0].invocation_count == 1
    found = {
        one.status: one for one in client.evals.runs.output_items.list(run.id, eval_id=made.id)
    }
    assert (found["error"].datasource_item_id, found["error"].results) == (1, [])
    assert found["error"].sample.error.code == "leaked"
    # A run is shown by its report, and no score is read for it.
    with service.database.write() as connection:
        scores = tables.evaluation_scores
        connection.execute(sa.delete(scores).where(scores.c.evaluation_id == run.id))
    assert client.evals.runs.retrieve(run.id, eval_id=made.id) == done


def test_a_run_goes_on_after_a_restart(tmp_path: Path) -> None:
    body = {"data_source_config": CONFIG, "testing_criteria": [SAME]}
    with Service(tmp_path / "data") as first:
        first.supervisor.leader_work.evaluations.timing = BackgroundTiming(soon_s=0, enough=2)
        played = PlayedAnswers(first).set_up()
        first.spare = lambda _: len(played.asked) < 40
        made = first.call("POST", "/openai/v1/evals", json=body).json()["id"]
        source = source_of(played.baseline, items(60))
        path = f"/openai/v1/evals/{made}/runs"
        run = first.call("POST", path, json={"data_source": source}).json()["id"]
        first.until(lambda: len(played.results(run)) >= 20)
        first.halt()
    with Service(tmp_path / "data") as second:
        again = played.moved_to(second)
        assert again.ended(run)["status"] == "completed"
        counts = second.call("GET", f"{path}/{run}").json()["result_counts"]
        assert counts == {"total": 60, "passed": 60, "failed": 0, "errored": 0}
        assert len(again.asked) <= 40


@pytest.mark.parametrize(("body", "code", "param"), BAD_EVALS)
def test_an_eval_with_what_is_not_offered_is_refused_by_its_name(
    played: PlayedAnswers, body: dict[str, Any], code: str, param: str
) -> None:
    check_refused(played.service, "evals", body, code, param)


def check_refused(service: Service, path: str, body: Any, code: str, param: str) -> Any:
    before = state_of(service)
    answer = service.call(
        "POST", f"/openai/v1/{path}", None, headers=bare_headers(service), json=body
    )
    error = answer.json()["error"]
    assert answer.status_code in (400, 404), answer.text
    assert (error["code"], error["param"]) == (code, param), answer.text
    assert "planted" not in answer.text
    assert "secret" not in answer.text
    assert state_of(service) == before
    return error


def state_of(service: Service) -> list[int]:
    counted = (tables.evals, tables.evaluations, tables.datasets, tables.object_keys)
    with service.database.read() as connection:
        return [
            connection.scalar(sa.select(sa.func.count()).select_from(one)) or 0 for one in counted
        ]


@pytest.fixture(scope="module")
def known(client: openai.OpenAI) -> str:
    return defined(client).id


@pytest.mark.parametrize(("change", "code", "param"), BAD_RUNS)
def test_a_run_that_cannot_be_made_is_refused_by_its_place(
    played: PlayedAnswers, known: str, change: dict[str, Any], code: str, param: str
) -> None:
    body = {"data_source": source_of(played.baseline, [ROW]) | change}
    check_refused(played.service, f"evals/{known}/runs", body, code, param)


def test_a_row_of_which_a_criterion_makes_too_long_a_text_is_refused_by_its_place(
    client: openai.OpenAI, played: PlayedAnswers
) -> None:
    made = defined(client, SAME | {"reference": "{{item.chapter}}" * 9})
    rows = [ROW, {"item": {"question": "?", "chapter": "x" * 200_000}}]
    body = {"data_source": source_of(played.baseline, rows)}
    place = f"{SOURCE}.content[1].item"
    check_refused(played.service, f"evals/{made.id}/runs", body, "invalid_value", place)


def test_bad_lines_of_a_file_are_named_together(
    client: openai.OpenAI, played: PlayedAnswers, known: str
) -> None:
    long = b'{"item": {"question": "%s"}}' % (b"x" * (9 << 20))
    lines = [b"{", json.dumps(ROW).encode(), long, b"", b'{"item": {}, "label": 1}']
    file = client.files.create(file=("rows.jsonl", b"\n".join(lines)), purpose="evals")
    body = {"data_source": source_of(played.baseline, {"type": "file_id", "id": file.id})}
    error = check_refused(played.service, f"evals/{known}/runs", body, "invalid_value", SOURCE)
    assert [one["line"] for one in error["details"]] == [1, 3, 5]
    with pytest.raises(openai.PermissionDeniedError):
        client.files.content(file.id)
    assert file.id in {one.id for one in client.files.list(purpose="evals")}
    # A file for a batch has no rows of an eval, and the other way round.
    batch = client.files.create(file=("b.jsonl", b"{}"), purpose="batch")
    body = {"data_source": source_of(played.baseline, {"type": "file_id", "id": batch.id})}
    check_refused(played.service, f"evals/{known}/runs", body, "not_found", f"{SOURCE}.id")
    with pytest.raises(openai.BadRequestError):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )


def test_no_text_of_a_row_a_prompt_or_an_answer_is_in_the_database_or_the_log(
    client: openai.OpenAI, played: PlayedAnswers, known: str
) -> None:
    run = client.evals.runs.create(known, data_source=source_of(played.baseline, items(5)))
    done = ended(client, played.service, run)
    found = client.evals.runs.output_items.list(run.id, eval_id=known)
    assert "planted" not in done.to_json() + "".join(one.to_json() for one in found)
    with played.service.database.read() as connection:
        for table in tables.METADATA.sorted_tables:
            rows = connection.execute(sa.select(table)).all()
            assert "planted" not in str(rows), table.name
    assert not [line for line in played.service.log.texts if "planted" in line]


def test_a_run_that_asks_a_model_in_hipaa_mode_is_shown_as_the_mode_allows(
    start: Callable[..., Service],
) -> None:
    service = start(private_networks=("10.0.0.0/8",))
    service.come_over_tls()
    deployment = service.deployment("safe", security_settings={"compliance_mode": "hipaa"})
    body = {"data_source_config": CONFIG, "testing_criteria": [SAME]}
    made = service.call("POST", "/openai/v1/evals", json=body).json()["id"]
    path = f"/openai/v1/evals/{made}/runs"

    def run_on(file_id: str) -> Any:
        source = source_of(deployment, {"type": "file_id", "id": file_id})
        return service.call("POST", path, json={"data_source": source})

    def uploaded() -> str:
        form, files = {"purpose": "evals"}, {"file": ("rows.jsonl", jsonl(*items(2)))}
        answer = service.call("POST", "/openai/v1/files", data=form, files=files)
        return answer.json()["id"]

    shown = f"{path}/{run_on(uploaded()).json()['id']}"
    service.until(lambda: service.call("GET", shown).json()["status"] in ENDS)
    safe = service.call("GET", shown).json()
    assert safe["result_counts"] == {"total": 2, "passed": 0, "failed": 2, "errored": 0}
    service.url = "http://service.test"
    unsafe_file = uploaded()
    for looked_at in (path, shown, f"{shown}/output_items"):
        assert service.call("GET", looked_at).status_code == 400
    service.come_over_tls()
    before = datasets_of(service)
    refused = run_on(unsafe_file)
    assert (refused.status_code, refused.json()["error"]["param"]) == (409, f"{SOURCE}.id")
    assert datasets_of(service) == before
