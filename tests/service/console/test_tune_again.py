"""A job that is tuned again from its page, and another job's losses beside its own."""

import json
from typing import Any

import pytest

from tests.support.payloads import SCRIPTS
from tests.support.service.console import Browser, Form, Markup, signed_in
from tests.support.service.in_process import Service
from tests.support.service.world import World

CREATE = "/console/do/create_job"
SAME = (
    "base_model",
    "dataset_id",
    "validation_dataset_id",
    "fine_tuning_method",
    "validation_frequency",
    "hyperparameters",
    "compute_config",
    "security_settings",
    "comparison",
    "tags",
)


def form_of(browser: Browser, job: str) -> dict[str, str]:
    return Form(browser.open(f"/console/jobs/{job}/again").text, CREATE).fields


def record(service: Service, job: str) -> dict[str, Any]:
    return service.call("GET", f"/v1/fine-tuning/jobs/{job}").json()


def jobs(service: Service) -> int:
    return service.call("GET", "/v1/fine-tuning/jobs?limit=1").json()["pagination"]["total"]


def test_the_form_sent_as_it_is_makes_the_same_job(service: Service) -> None:
    held_out = service.dataset()
    chosen: dict[str, Any] = {
        "learning_rate": 3e-4,
        "batch_size": "auto",
        "epochs": 2,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "early_stopping_patience": 3,
    }
    job = service.job(
        validation_dataset_id=held_out,
        hyperparameters=chosen,
        validation_frequency=5,
        comparison={"seed": 4},
        security_settings={"audit_logging": True},
        tags={"team.unit": "radiology, north", "empty": ""},
    )
    browser = signed_in(service)
    fields = form_of(browser, job)
    answers = [browser.post(CREATE, fields) for _ in range(2)]
    assert {one.status_code for one in answers} == {303}
    # A double click is one request.
    assert answers[0].headers["location"] == answers[1].headers["location"]
    assert jobs(service) == 2
    made = answers[0].headers["location"].removeprefix("/console/jobs/")
    first, second = record(service, job), record(service, made)
    first["tags"].pop("empty")
    assert {name: second.get(name) for name in SAME} == {name: first.get(name) for name in SAME}
    assert second["model_name"] == first["model_name"]


def test_the_page_says_what_may_be_sent(world: World) -> None:
    page = signed_in(world.service).open(f"/console/jobs/{world.ids['ft_own']}/again").text
    assert "1 to 1024, or auto" in page
    assert '<option value="standard" selected>standard</option>' in page


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("hyperparameters.learning_rate", "fast", "hyperparameters.learning_rate"),
        ("hyperparameters.batch_size", "0", "hyperparameters.batch_size"),
        ("hyperparameters.target_modules[]", "nothing", "hyperparameters.target_modules"),
        ("validation_frequency", "1.5", "validation_frequency"),
        ("dataset_id", "ds_" + "x" * 24, "dataset_id"),
        ("compute_config.instance_type", "moon", "compute_config.instance_type"),
        ("model_name", SCRIPTS[0], "model_name"),
        ("tags.a", "\x1b[2J", "tags"),
    ],
)
def test_a_refusal_stands_beside_its_field_and_nothing_typed_is_lost(
    world: World, field: str, value: str, named: str
) -> None:
    browser, before = signed_in(world.service), jobs(world.service)
    fields = form_of(browser, world.ids["ft_own"]) | {field: value}
    answer = browser.post(CREATE, fields)
    assert 400 <= answer.status_code < 500
    page = Markup(answer.text)
    shown = answer.text.split('<p class="problem"')[1:]
    assert any(f">{named}" in one.partition("</p>")[0] for one in shown) or field == "tags.a"
    assert "No job was made: " in answer.text
    assert not [tag for tag, given in page.tags if tag == "script" and not given.get("src")]
    again = Form(answer.text, CREATE).fields
    if field in again:
        assert again[field] == value
    assert again["idempotency_key"] != fields["idempotency_key"]
    assert again["back"] == fields["back"]
    assert jobs(world.service) == before


def test_a_field_that_no_job_has_is_refused(world: World) -> None:
    browser, before = signed_in(world.service), jobs(world.service)
    fields = form_of(browser, world.ids["ft_own"])
    for more in (
        {"colour": "vermilion"},
        {"hyperparameters.colour": "vermilion"},
        {"hyperparameters": "vermilion"},
    ):
        answer = browser.post(CREATE, fields | more)
        assert answer.status_code in (400, 422)
        assert "vermilion" not in Markup(answer.text).text
    assert jobs(world.service) == before


def test_only_who_may_make_jobs_tunes_again(world: World) -> None:
    job = world.ids["ft_own"]
    whole = form_of(signed_in(world.service), job)
    for preset, may in (("trainer", True), ("viewer", False), ("operator", False)):
        browser = signed_in(world.service, preset)
        assert ("/again" in browser.open(f"/console/jobs/{job}").text) == may
        assert bool(form_of(browser, job)) == may
        # Another session's token, and then its own with a dataset that there is not.
        assert browser.post(CREATE, whole).status_code == 403
        own = {"form_token": browser.form_token(), "dataset_id": world.ids["ds_missing"]}
        assert browser.post(CREATE, whole | own).status_code == (404 if may else 403)


def test_a_refused_form_leads_to_own_pages_only(world: World) -> None:
    browser = signed_in(world.service)
    sent = {"form_token": browser.form_token(), "back": "//evil.test/x"}
    answer = browser.post(CREATE, sent)
    assert answer.status_code == 400
    assert "evil" not in answer.text


def test_another_job_is_drawn_beside_this_one(service: Service) -> None:
    made = [
        service.job(model_name=name, hyperparameters={"seed": n}) for n, name in enumerate("ab")
    ]
    for number, job in enumerate(made):
        trainer = service.trainer_of(job)
        trainer.start_of(6)
        for step in (2, 4 + number):
            trainer.step(step, loss=1.0 + number, evaluated=True)
        path = f"/v1/fine-tuning/jobs/{job}/metrics?evaluated_only=true"
        service.until(lambda path=path: len(service.call("GET", path).json()["steps"]) == 2)
    one, other = made
    browser = signed_in(service)
    page = browser.open(f"/console/jobs/{one}?with={other}").text
    data = json.loads(page.partition('id="points-loss">')[2].partition("</script>")[0])
    assert data["other"] == "b"
    steps, *_, own, beside = data["columns"]
    assert steps == [2, 4, 5]
    assert (own, beside) == ([1.0, 1.0, None], [2.0, None, 2.0])
    facts = page.partition('id="h-hyperparameters"')[2]
    assert facts.index("seed") < facts.index("batch_size")
    assert "0, there 1" in facts
    assert f'value="{other}"' in browser.open(f"/console/jobs/{one}").text
