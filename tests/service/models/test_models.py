"""One model by its id: its forms, its limits, the operations it allows, and its deletion."""

from pathlib import Path
from urllib.parse import quote

import pytest
import sqlalchemy as sa

from tests.support.objects.files import contents_below
from tests.support.service.in_process import CATALOGUE, Service
from tuneship.service.recovery import recover
from tuneship.store.database import rows, tables
from tuneship.store.files.quarantine import SET_ASIDE

pytestmark = pytest.mark.both_databases(postgres="soak")
ITEM = {
    "id", "name", "version", "description", "parameters", "context_length",
    "supported_fine_tuning", "base_model", "fine_tuning_job_id", "created_at",
    "fine_tuning_method", "ends_learnt", "appended_end", "tags",
}  # fmt: skip
BASE = CATALOGUE.default


def forms(model_id: str) -> set[str]:
    """The two ways in which a path may hold an id."""
    return {f"/v1/models/{model_id}", f"/v1/models/{quote(model_id, safe='')}"}


def files_of(service: Service, model_id: str) -> Path:
    with service.database.read() as connection:
        row = rows.fetch(connection, tables.models, model_id, client_id=None)
    assert row is not None
    return service.parts.blobs.path_of(row["blob"])


def test_both_kinds_of_model_have_the_one_form_in_a_list_and_alone(service: Service) -> None:
    tuned = service.model()
    listed = service.call("GET", "/v1/models").json()["models"]
    assert [one["id"] for one in listed] == ["tuneship-tiny", tuned]
    for item in listed:
        # The one shipped model names its licence.
        assert set(item) == ITEM | ({"licence"} if item["base_model"] is None else set())
        for path in forms(item["id"]):
            assert service.call("GET", path).json() == item
    base, own = listed
    assert (base["supported_fine_tuning"], own["supported_fine_tuning"]) == (True, False)
    assert (base["base_model"], base["fine_tuning_job_id"], base["tags"]) == (None, None, {})
    assert (own["base_model"], own["fine_tuning_method"]) == ("tuneship-tiny", "lora")
    assert own["fine_tuning_job_id"] == f"ft_{tuned.rpartition(':')[2]}"


def test_models_are_filtered_by_base_kind_and_tags(service: Service) -> None:
    tuned = service.model()

    def found(query: str) -> list[str]:
        models = service.call("GET", f"/v1/models?{query}").json()["models"]
        return [one["id"] for one in models]

    assert found("fine_tuned_only=true") == [tuned]
    assert found("base_model=tuneship-tiny") == [tuned]
    assert found("base_model=another") == []
    assert found("tags[team]=a") == []
    assert found("limit=1") == ["tuneship-tiny"]
    assert found("limit=1&offset=1") == [tuned]


def test_the_limits_of_a_base_model_are_those_of_the_checks(service: Service) -> None:
    for path in forms("tuneship-tiny"):
        got = service.call("GET", f"{path}/limits").json()
        assert set(got) == {
            "id", "fine_tuning_methods", "hyperparameters", "target_modules", "context_length",
            "max_output_tokens",
        }  # fmt: skip
    assert (got["id"], got["fine_tuning_methods"]) == ("tuneship-tiny", ["lora"])
    assert got["context_length"] == got["max_output_tokens"] == BASE.context_length
    assert got["target_modules"] == sorted(BASE.linear_modules)
    limits = got["hyperparameters"]
    fields = {
        "type", "min", "max", "exclusive_min", "exclusive_max", "default", "auto", "description",
    }  # fmt: skip
    assert all(set(one) == fields for one in limits.values())

    def bounds(name: str) -> list[object]:
        keys = ("min", "exclusive_min", "max", "exclusive_max", "default", "auto")
        return [limits[name][key] for key in keys]

    assert bounds("learning_rate") == [0, True, 1, False, 2e-4, True]
    assert bounds("batch_size") == [1, False, 1024, False, 8, True]
    assert bounds("epochs") == [1, False, 10_000, False, 3, True]
    assert bounds("warmup_steps") == [0, False, None, False, 0, True]
    assert bounds("lora_rank") == [1, False, 512, False, 16, False]
    assert bounds("lora_alpha") == [1, False, 2048, False, 32, False]
    assert bounds("lora_dropout") == [0, False, 1, True, 0.05, False]
    assert limits["target_modules"]["default"] == ["all-linear"]


@pytest.mark.parametrize(
    "name", ["batch_size", "epochs", "lora_rank", "lora_alpha", "learning_rate", "lora_dropout"]
)
def test_a_bound_that_is_shown_is_the_one_that_is_checked(shared: Service, name: str) -> None:
    limits = shared.call("GET", "/v1/models/tuneship-tiny/limits").json()["hyperparameters"][name]
    dataset = shared.dataset()

    def status(value: float) -> int:
        # A warm-up that is too long is refused after the bounds, so nothing is made here.
        asked = {name: value, "warmup_steps": 2**60}
        body = {"base_model": "tuneship-tiny", "dataset_id": dataset, "model_name": "m"}
        answer = shared.call("POST", "/v1/fine-tuning/jobs", json=body | {"hyperparameters": asked})
        is_own = answer.json()["error"]["param"] == f"hyperparameters.{name}"
        return answer.status_code if is_own else 0

    step = 1 if limits["type"] == "integer" else 1e-9
    for side, outwards in (("min", -step), ("max", step)):
        is_excluded = limits[f"exclusive_{side}"]
        assert status(limits[side]) == (422 if is_excluded else 0)
        assert status(limits[side] + outwards) == 422


def test_a_tuned_model_is_only_served(service: Service) -> None:
    tuned = service.model()
    for path in forms(tuned):
        got = service.call("GET", f"{path}/limits").json()
        assert (got["id"], got["context_length"]) == (tuned, BASE.context_length)
        assert (got["fine_tuning_methods"], got["hyperparameters"]) == ([], {})


def test_a_deleted_model_is_gone_with_its_files(service: Service) -> None:
    tuned = service.model()
    folder = files_of(service, tuned)
    assert list(folder.iterdir())
    answer = service.call("DELETE", f"/v1/models/{quote(tuned, safe='')}")
    assert (answer.status_code, answer.json()) == (200, {"id": tuned, "deleted": True})
    assert not folder.exists()
    for call in (("GET", ""), ("GET", "/limits"), ("DELETE", "")):
        again = service.call(call[0], f"/v1/models/{tuned}{call[1]}")
        assert again.json()["error"]["code"] == "model_not_found"
    page = service.call("GET", "/v1/models?fine_tuned_only=true").json()
    assert (page["models"], page["pagination"]["total"]) == ([], 0)
    job = service.call("GET", "/v1/fine-tuning/jobs").json()["jobs"][0]
    assert (job["status"], job["fine_tuned_model"]) == ("completed", tuned)
    body = {"model_name": tuned, "deployment_name": "late"}
    late = service.call("POST", "/v1/deployments", json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (404, "model_not_found")


def test_a_deployed_model_stays_until_its_deployments_are_deleted(service: Service) -> None:
    tuned = service.model()
    deployments = [service.deployment(name, model_name=tuned) for name in ("one", "two")]
    refused = service.call("DELETE", f"/v1/models/{tuned}")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (409, "invalid_request_error")
    assert all(one in error["message"] for one in deployments)
    assert files_of(service, tuned).exists()
    for one in deployments:
        service.call("DELETE", f"/v1/deployments/{one}")
        service.until(lambda one=one: service.deployment_status(one) == "deleted")
    assert service.call("DELETE", f"/v1/models/{tuned}").status_code == 200


def test_files_that_a_crash_left_behind_are_set_aside_and_the_others_stay(service: Service) -> None:
    lost, kept = service.model(), service.model()
    left, stays = files_of(service, lost), files_of(service, kept)
    # The service was killed after the commit and before the files were deleted.
    with service.database.write() as connection:
        connection.execute(sa.delete(tables.models).where(tables.models.c.id == lost))
    content = contents_below(left)
    recover(service.parts, None)
    assert not left.exists()
    (set_aside,) = (service.settings.data_dir / SET_ASIDE).iterdir()
    aside = contents_below(set_aside / "models" / left.name)
    assert {path.name: one for path, one in aside.items()} == {
        path.name: one for path, one in content.items()
    }
    assert stays.exists()


def test_the_files_stay_when_the_commit_fails(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = service.model()
    folder = files_of(service, tuned)

    def broken(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(rows, "remove", broken)
    assert service.call("DELETE", f"/v1/models/{tuned}").status_code == 500
    assert folder.exists()
    assert service.call("GET", f"/v1/models/{tuned}").status_code == 200


@pytest.mark.parametrize(
    ("send", "status", "allow"),
    [
        ("DELETE /v1/models/tuneship-tiny/limits", 405, "GET"),
        ("POST /v1/models/tuneship-tiny/limits", 405, "GET"),
        ("POST /v1/models/tuneship-tiny", 405, "DELETE, GET"),
        ("PATCH /v1/models/org/model", 405, "DELETE, GET"),
        ("PATCH /v1/models", 405, "GET, POST"),
    ],
)
def test_routes_of_a_model_do_not_swallow_each_other(
    shared: Service, send: str, status: int, allow: str
) -> None:
    method, path = send.split()
    answer = shared.call(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (status, allow)
