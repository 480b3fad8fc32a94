"""A card must agree with the result of its release, and no text of a dossier reaches the terminal as a command."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.unit.cards.cards import card
from tuneship.cards.canonical import canonical, card_sha256
from tuneship.cards.rendering import as_markdown
from tuneship.cli.main import app
from tuneship.contract.model_card import ModelCard
from tuneship.dossier.archive import pack
from tuneship.dossier.checks import verify
from tuneship.dossier.contents import MANIFEST, made_here, written_manifest
from tuneship.dossier.json_values import difference


def lines(*facts: dict[str, Any]) -> bytes:
    return "".join(json.dumps(fact) + "\n" for fact in facts).encode()


def dossier(shown: ModelCard, run_key: str = "run", reason: str = "cancelled") -> bytes:
    """The dossier of a release that was stopped, after its clean-up; made here, as an attacker can make one."""
    result = {"run_key": run_key, "outcome": "rolled_back", "reason": reason}
    members = {
        "result.json": lines(result | {"training_gates": [], "model_card": "model_card.json"}),
        "release.jsonl": lines(
            {"kind": "begun", "run_key": run_key},
            {"kind": "model_card", "sha256": card_sha256(shown)},
            {"kind": "ended", "outcome": "rolled_back", "reason": reason},
        ),
        "model_card.json": canonical(shown),
        "model_card.md": as_markdown(shown).encode(),
    }
    return pack(members | {MANIFEST: written_manifest(members, made_here())})


@pytest.mark.parametrize(
    ("run_key", "problems"),
    [
        ("run", []),
        ("other", ["model_card.json.decisions.run_key: run, but other by result.json"]),
    ],
)
def test_the_card_of_a_stopped_release_is_of_its_run(run_key: str, problems: list[str]) -> None:
    # It was written before the clean-up, and has a model, gates and an outcome that the result does not know.
    assert verify(dossier(card("run"), run_key)).problems == problems


def test_the_texts_of_a_dossier_are_shown_as_one_line(tmp_path: Path) -> None:
    hostile = "\x1b[2J\nall good"
    file = tmp_path / "dossier.zip"
    file.write_bytes(dossier(card(hostile), hostile, hostile))
    done = CliRunner().invoke(app, ["releases", "verify", str(file)])
    assert done.exit_code == 5, done.output
    assert "\x1b" not in done.output
    assert f"{file}: \\u001b[2J\\nall good: rolled_back (\\u001b[2J\\nall good)\n" in done.output


def test_messages_about_a_hostile_dossier_are_short_and_few() -> None:
    hostile = "\x1b[2J\n\u202e" + "x" * 10_000
    members = {
        "result.json": json.dumps({hostile: 1, "run_key": hostile, "training_gates": []}).encode(),
        "release.jsonl": lines({"kind": "begun", "run_key": hostile + "y"}),
    }
    manifest: dict[str, Any] = json.loads(written_manifest(members, made_here()))
    for listed in ({f"{hostile}{n}": {} for n in range(1000)}, manifest["members"]):
        content = manifest | {"members": listed, hostile: {hostile: hostile}}
        found = verify(pack(members | {MANIFEST: json.dumps(content).encode()}))
        assert 1 < len(found.problems) <= 101
        assert all(one.isprintable() and len(one) < 500 for one in found.problems)
    assert hostile[:5] not in str(found.problems)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        (764.0, 764, True),
        ({"a": [1, 2.5]}, {"a": [1.0, 2.5]}, True),
        (float("nan"), float("nan"), True),
        (1, True, False),
        (1.0, True, False),
        (1.0, 2, False),
        (2**53, 2**53 + 1, False),
        (1, "1", False),
    ],
)
def test_numbers_are_the_same_by_their_value(ours: object, theirs: object, is_same: bool) -> None:
    assert (difference(ours, theirs) is None) == is_same
