"""`tuneship models card` writes what a service knows of a model's origin, and what the card of its release adds."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.service.in_process import Service
from tuneship.cards.canonical import canonical
from tuneship.cli.main import app
from tuneship.contract.model_card import CardDecisions, ModelCard, Statements


@pytest.fixture
def environment(service: Service, tmp_path: Path) -> dict[str, str]:
    service.listen()
    return {
        "TUNESHIP_URL": service.url,
        "TUNESHIP_API_KEY": service.headers["alice"]["Authorization"].removeprefix("Bearer "),
        "TUNESHIP_CLIENT_ID": "alice",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


def card(environment: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(app, ["models", "card", *words], env=environment)


def test_a_card_has_the_origin_and_with_its_release_all_that_was_found(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    model = service.model()
    done = card(environment, model, "--json")
    assert done.exit_code == 0, done.output
    alone = ModelCard.model_validate_json(done.stdout)
    assert done.stdout.encode() == canonical(alone)
    assert (alone.model.id, alone.model.base_licence) == (model, "apache-2.0")
    assert alone.training is not None
    assert [one.id for one in alone.data] == [
        service.call("GET", f"/v1/fine-tuning/jobs/{alone.training.job_id}").json()["dataset_id"]
    ]
    assert (alone.decisions, alone.completeness.stated) == (None, 0)

    decisions = CardDecisions(run_key="k", outcome="promoted", reason="none", gates=[])
    stated = Statements(users="coders")
    released = alone.model_copy(update={"decisions": decisions, "statements": stated})
    (tmp_path / "model_card.json").write_bytes(canonical(released))
    result = tmp_path / "out.json"
    # The folder has moved since.
    result.write_text(json.dumps({"model_card": "/elsewhere/model_card.json"}))
    done = card(environment, model, "--release", str(result))
    assert done.exit_code == 0, done.output
    assert "| outcome | promoted |" in done.stdout
    assert "- **users**: coders" in done.stdout

    other = alone.model_copy(update={"model": alone.model.model_copy(update={"id": "ft:b:n:x"})})
    (tmp_path / "model_card.json").write_bytes(canonical(other))
    done = card(environment, model, "--release", str(result))
    assert (done.exit_code, done.stderr) == (
        1,
        "tuneship: --release: its model card is of another model\n",
    )


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("{}", "is no result file of a release with a model card"),
        ('{"model_card": 3}', "is no result file of a release with a model card"),
        ('{"model_card": "result.json"}', "is no model card"),
        ('{"model_card": "missing.json"}', "No such file or directory"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, written: str, why: str) -> None:
    result = tmp_path / "result.json"
    result.write_text(written)
    done = card({}, "ft:b:n:x", "--release", str(result))
    assert done.exit_code == 1
    assert done.stderr.startswith("tuneship: --release: ")
    assert done.stderr.rstrip().endswith(why)


def test_a_base_model_has_no_card(service: Service, environment: dict[str, str]) -> None:
    done = card(environment, "tuneship-tiny")
    assert done.exit_code == 1
    assert "a base model has no card here" in done.stderr
