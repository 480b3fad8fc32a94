"""The dossier of a real release holds all that its decisions rest on, and whatever is changed in it is named."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from flows.forms.release_form import ReleaseParameters
from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.dossier_changes import CHANGES, Members, bad_head, json_change, put
from tests.support.service.evaluations import PLANTED, PlayedAnswers, right, rows
from tests.support.service.in_process import jsonl
from tests.system.faults.stage import Stage, Trainings
from tuneship.cards.rendering import as_markdown
from tuneship.cli.main import app
from tuneship.contract.model_card import ModelCard
from tuneship.dossier.archive import pack, unpack
from tuneship.dossier.contents import MANIFEST, MEMBERS, written_manifest
from tuneship.store.database import tables

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

HELD_OUT = 160
NAMES = sorted(MEMBERS)


@dataclass
class Released:
    """A service on which releases run, and the folder with their results."""

    stage: Stage
    played: PlayedAnswers
    folder: Path
    environment: dict[str, str]

    def run(self, *words: object, **environment: str) -> Result:
        """A command of `tuneship releases`."""
        chosen = self.environment | environment
        return CliRunner().invoke(app, ["releases", *map(str, words)], env=chosen)

    def release(self, name: str, **chosen: Any) -> Path:
        """Release a model, and return the result file."""
        plan = self.stage.plan(candidate_deployment_id="none").model_dump(exclude_unset=True)
        pair = ("endpoint_id", "baseline_deployment_id", "candidate_deployment_id")
        parameters = {
            "model_name": name,
            "endpoint": {"id": self.stage.endpoint},
            "canary": {field: value for field, value in plan.items() if field not in pair},
        }
        result = tune_and_deploy(ReleaseParameters.model_validate(parameters | chosen))
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(result.model_dump(mode="json"), indent=2) + "\n")
        return file

    def evaluation(self) -> dict[str, Any]:
        file = self.folder / "held-out.jsonl"
        file.write_bytes(jsonl(*rows(HELD_OUT)))
        graders = [{"name": "chapter", "type": "string_check"}]
        return {"file": str(file), "graders": graders, "slice_by": ["site"], "margin": 0.08}

    def trained(self) -> Path:
        """Train on planted texts and release the model: it is promoted."""
        file = self.folder / "train.jsonl"
        file.write_bytes(jsonl(*rows(HELD_OUT + 80)[HELD_OUT:]))
        return self.release(
            "trained",
            data={"files": [str(file)]},
            training_gates={"min_validation_examples": 1},
            evaluation=self.evaluation(),
        )


@pytest.fixture(scope="module")
def released(prefect_api: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Released]:
    folder = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch, Stage(folder) as stage:
        patch.setenv("TUNESHIP_RECORDS", str(folder / "records"))
        patch.setenv("TUNESHIP_REPORTS", str(folder / "reports"))
        played = PlayedAnswers(stage.service).set_up()
        stage.baseline = played.baseline
        stage._open({stage.baseline: 100})
        key = stage.service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        environment = {
            "TUNESHIP_URL": stage.service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
        }
        # The first trained the model that is played; the later ones train for releases.
        stage.service.engines.trainers.clear()
        with Trainings(stage):
            yield Released(stage, played, folder, environment)


@pytest.fixture(scope="module")
def unpromoted(released: Released) -> dict[str, Path]:
    """The results of a release that an evaluation rejects, and of one that fails too often under traffic."""
    found: dict[str, Path] = {}
    path = f"/v1/deployments/{released.played.candidate}"
    model = released.stage.service.call("GET", path).json()["model_name"]
    released.played.tuned_fails = range(0, HELD_OUT, 2)
    evaluation = released.evaluation()
    found["rejected"] = released.release("worse", model=model, evaluation=evaluation)
    released.played.tuned_fails = ()
    released.stage.candidate_errors_in = 5
    found["rolled_back"] = released.release("failing", model=model)
    released.stage.candidate_errors_in = 300
    return found


@pytest.fixture(scope="module")
def made(released: Released, unpromoted: dict[str, Path]) -> Path:
    """The dossier of a promoted release; the promotion comes last, because it changes the baseline."""
    result = released.trained()
    file = released.folder / "dossier.zip"
    done = released.run("dossier", result, "-o", file)
    assert done.exit_code == 0, done.output
    return file


@pytest.fixture
def members(made: Path) -> Members:
    return unpack(made.read_bytes(), MEMBERS)


def verified(released: Released, members: Mapping[str, bytes], *options: object) -> Result:
    file = released.folder / "changed.zip"
    file.write_bytes(pack(members))
    return released.run("verify", file, *options)


def with_manifest(members: Members) -> Members:
    """The members with a manifest that fits them, as somebody writes it who has changed them."""
    made_by = json.loads(members[MANIFEST])["made_by"]
    return members | {MANIFEST: written_manifest(members, made_by)}


def test_a_dossier_has_everything_and_verifies(
    released: Released, made: Path, members: Members
) -> None:
    assert set(members) == set(NAMES)
    done = released.run("verify", made, "--online")
    assert done.exit_code == 0, done.output
    assert "checks of the rollout, 12 training gates, the evaluation" in done.output
    assert "promoted (none)" in done.output
    assert hashlib.sha256(made.read_bytes()).hexdigest() in done.output
    manifest = json.loads(members[MANIFEST])
    assert manifest["absent"] == {}
    data = manifest["release"]["data"]
    trained = hashlib.sha256((released.folder / "train.jsonl").read_bytes()).hexdigest()
    assert data["training_sha256"] == [trained]
    assert len(data["held_out_sha256"]) == 64


def test_no_text_of_the_data_and_no_answer_is_in_it(members: Members) -> None:
    for name, content in members.items():
        for text in (PLANTED, *map(right, range(4))):
            assert text.encode() not in content, name


def test_two_dossiers_of_one_release_are_equal_and_one_is_not_replaced(
    released: Released, made: Path, tmp_path: Path
) -> None:
    result = released.folder / "trained.json"
    files = [tmp_path / "a.zip", tmp_path / "b.zip"]
    for file in files:
        assert released.run("dossier", result, "-o", file, "--no-audit-head").exit_code == 0
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert {file.name for file in tmp_path.iterdir()} == {"a.zip", "b.zip"}
    assert files[0].stat().st_mode & 0o077 == 0
    done = released.run("dossier", result, "-o", files[0])
    assert (done.exit_code, files[0].read_bytes()) == (1, first)
    assert "--overwrite" in done.output
    assert released.run("dossier", result, "-o", files[0], "--overwrite").exit_code == 0
    assert files[0].read_bytes() != first
    done = released.run("verify", files[1])
    assert done.exit_code == 5
    assert "no audit head" in done.output


@pytest.mark.parametrize("outcome", ["rejected", "rolled_back"])
def test_a_release_that_was_not_promoted_has_one_too(
    released: Released, unpromoted: dict[str, Path], tmp_path: Path, outcome: str
) -> None:
    file = tmp_path / "dossier.zip"
    assert released.run("dossier", unpromoted[outcome], "-o", file).exit_code == 0
    done = released.run("verify", file)
    assert done.exit_code == 0, done.output
    assert f": {outcome} (" in done.output
    names = set(unpack(file.read_bytes(), MEMBERS))
    assert ("rollout.jsonl" in names) == (outcome == "rolled_back")
    assert "training.json" not in names


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_named_with_its_member(
    released: Released, made: Path, members: Members, name: str
) -> None:
    content = bytearray(made.read_bytes())
    place = content.index(members[name]) + len(members[name]) // 2
    content[place] ^= 1
    file = released.folder / "changed.zip"
    file.write_bytes(content)
    done = released.run("verify", file)
    assert done.exit_code == 4
    assert f"{name} was changed" in done.output

    changed = bytearray(members[name])
    changed[len(changed) // 2] ^= 1
    done = verified(released, members | {name: bytes(changed)})
    assert done.exit_code == 4
    # A flipped bit of the manifest may be one of a digest, and then looks like a change of that member.
    assert name in done.output or name == MANIFEST
    assert done.stdout == ""


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_whose_digests_were_made_to_fit_is_named(
    released: Released, members: Members, name: str
) -> None:
    change, words = CHANGES[name]
    before = dict(members)
    change(members)
    assert members != before
    done = verified(released, with_manifest(members))
    assert done.exit_code == 4, done.output
    assert words in done.output, done.output
    # Without the new manifest, the digest names the member, too.
    assert verified(released, members).exit_code == 4


def _noted(value: Any, gate: str) -> Any:
    """The value where each result of this gate is a note in other words."""
    if isinstance(value, list):
        return [_noted(one, gate) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    found = {key: _noted(one, gate) for key, one in cast("dict[str, Any]", value).items()}
    return found | ({"state": "note", "note": "other"} if found.get("name") == gate else {})


def test_sentences_of_another_version_are_no_change(released: Released, members: Members) -> None:
    for path in (("in_words",), ("forecast", "in_words")):
        json_change("result.json", put(*path, value=["other words"]))(members)
    # T2 of an ended job is a note or a pass, by a measure that is another one in 26.12.0.
    card = hashlib.sha256(members["model_card.json"]).hexdigest().encode()
    for name in ("result.json", "release.jsonl", "model_card.json"):
        parts = members[name].splitlines() if name == "release.jsonl" else [members[name]]
        members[name] = b"\n".join(
            json.dumps(_noted(json.loads(part), "T2 divergence")).encode() for part in parts
        )
    changed = ModelCard.model_validate_json(members["model_card.json"])
    members["model_card.md"] = as_markdown(changed).encode()
    new_card = hashlib.sha256(members["model_card.json"]).hexdigest().encode()
    members["release.jsonl"] = members["release.jsonl"].replace(card, new_card)
    done = verified(released, with_manifest(members))
    assert done.exit_code == 0, done.output


def test_a_manifest_that_says_something_else_is_named(released: Released, members: Members) -> None:
    json_change(MANIFEST, put("release", "model", value="ft:other"))(members)
    done = verified(released, members)
    assert done.exit_code == 4
    assert "manifest.json.release.model: ft:other, but" in done.output


def test_bytes_beside_the_members_are_found(released: Released, made: Path) -> None:
    file = released.folder / "changed.zip"
    file.write_bytes(b"x" + made.read_bytes())
    done = released.run("verify", file)
    assert done.exit_code == 4
    assert "bytes that belong to no member" in done.output
    assert released.run("verify", released.folder / "none.zip").exit_code == 1


def test_a_head_of_somebody_else_is_found_by_the_key_and_by_the_service(
    released: Released, made: Path, members: Members
) -> None:
    key = json.loads(members["audit-head.jsonl"])["public_key"]
    assert released.run("verify", made, "--public-key", key).exit_code == 0
    bad_head(members)
    changed = with_manifest(members)
    assert verified(released, changed).exit_code == 0
    done = verified(released, changed, "--public-key", key)
    assert done.exit_code == 4
    assert "signed with another key" in done.output
    done = verified(released, changed, "--online")
    assert done.exit_code == 4
    assert "signs its audit heads with another key" in done.output


def test_a_changed_source_gets_no_dossier(released: Released, made: Path, tmp_path: Path) -> None:
    result = json.loads((released.folder / "trained.json").read_text())
    put("training_gates", "T3 learned", "limit", value=0.9)(result)
    file, out = tmp_path / "result.json", tmp_path / "dossier.zip"
    file.write_text(json.dumps(result))
    done = released.run("dossier", file, "-o", out, "--no-audit-head")
    assert done.exit_code == 4
    assert "T3 learned.limit" in done.output
    for content in ("[]", "{}", "no JSON", json.dumps(result | {"record": str(tmp_path / "gone")})):
        file.write_text(content)
        done = released.run("dossier", file, "-o", out, "--no-audit-head")
        assert done.exit_code == 1, content
        assert len(done.stderr.splitlines()) == 1
    assert not out.exists()


def test_a_service_without_an_answer_says_how_to_go_on(
    released: Released, made: Path, tmp_path: Path
) -> None:
    result, out = released.folder / "trained.json", tmp_path / "dossier.zip"
    reader = released.stage.service.key_headers("alice", frozenset({"jobs:read"}))
    key = reader["Authorization"].removeprefix("Bearer ")
    done = released.run("dossier", result, "-o", out, TUNESHIP_API_KEY=key)
    assert done.exit_code == 1
    assert "--no-audit-head" in done.output
    assert not out.exists()


def test_a_chain_that_was_cut_is_found_by_asking_the_service(
    released: Released, made: Path, members: Members
) -> None:
    """Last of this file: it takes rows from the chain."""
    seq = json.loads(members["audit-head.jsonl"])["seq"]
    with released.stage.service.database.write() as connection:
        connection.execute(sa.delete(tables.audit).where(tables.audit.c.seq >= seq))
    done = released.run("verify", made, "--online")
    assert done.exit_code == 4
    assert f"has no row {seq}" in done.output
    assert released.run("verify", made).exit_code == 0
