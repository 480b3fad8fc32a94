"""Changes of a dossier whose digests are made to fit, each with words of the message that names it."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from tuneship.cards.canonical import canonical, card_sha256
from tuneship.cards.rendering import as_markdown
from tuneship.contract.audit import AuditHead
from tuneship.contract.model_card import ModelCard
from tuneship.gates.record import linked
from tuneship.store.records.audit_heads import Head, Heads

Members = dict[str, bytes]


def json_change(name: str, change: Callable[[Any], None]) -> Callable[[Members], None]:
    def changed(members: Members) -> None:
        value = json.loads(members[name])
        change(value)
        members[name] = (json.dumps(value) + "\n").encode()

    return changed


def lines_change(
    name: str, change: Callable[[list[Any]], None], *, links: bool = False
) -> Callable[[Members], None]:
    def changed(members: Members) -> None:
        values = [json.loads(line) for line in members[name].splitlines()]
        change(values)
        last, lines = "", list[str]()
        for value in values:
            if links:
                value.pop("link", None)
                # As the writer's: without spaces.
                last = linked(last, json.dumps(value, separators=(",", ":")))
            else:
                last = json.dumps(value)
            lines.append(last)
        members[name] = ("\n".join(lines) + "\n").encode()

    return changed


def put(*path: Any, value: Any) -> Callable[[Any], None]:
    """Set a field of a field; a text in the path that is no field is the name or kind of a list's last such entry."""

    def change(found: Any) -> None:
        *first, last = path
        for step in first:
            found = (
                found[step]
                if not isinstance(found, list) or isinstance(step, int)
                else entry(found, step)
            )
        found[last] = value

    return change


def entry(found: list[Any], wanted: str) -> Any:
    return [one for one in found if wanted in (one.get("name"), one.get("kind"))][-1]


def bad_request(lines: list[Any]) -> None:
    look = [one for one in lines if one["kind"] == "look"][2]
    look["gates"][0]["candidate_bad"] += 1


def card_change(change: Callable[[Any], None]) -> Callable[[Members], None]:
    """A change of the card, with its text and its digest in the record made to fit."""

    def changed(members: Members) -> None:
        card = ModelCard.model_validate_json(members["model_card.json"]).model_dump(mode="json")
        change(card)
        again = ModelCard.model_validate(card)
        members |= {
            "model_card.json": canonical(again),
            "model_card.md": as_markdown(again).encode(),
        }
        digest = put("model_card", "sha256", value=card_sha256(again))
        lines_change("release.jsonl", digest)(members)

    return changed


def bad_head(members: Members) -> None:
    """A head of the same row under somebody's own key, which is sound in itself."""
    head = AuditHead.model_validate_json(members["audit-head.jsonl"])
    stranger = Heads(Path("nowhere"), b"s" * 32)
    again = stranger.signed(
        Head(head.seq, bytes.fromhex(head.mac)), datetime.fromisoformat(head.at)
    )
    members["audit-head.jsonl"] = (json.dumps(again.model_dump()) + "\n").encode()


def without(name: str) -> Callable[[Members], None]:
    def changed(members: Members) -> None:
        del members[name]

    return changed


CHANGES: dict[str, tuple[Callable[[Members], None], str]] = {
    "a look, without its hashes": (
        lines_change("rollout.jsonl", bad_request),
        "rollout.jsonl: line ",
    ),
    "a look, with its hashes": (
        lines_change("rollout.jsonl", bad_request, links=True),
        "rollout.jsonl: look 3.gates.0.candidate_bad: recorded",
    ),
    "a decision of the result": (
        json_change("result.json", put("decisions", 2, "verdict", value="rollback")),
        "result.json.decisions look 3.verdict: rollback, but",
    ),
    "a number of a look's gate in the result": (
        json_change(
            "result.json", put("decisions", 1, "gates", "error", "candidate_bad", value=99)
        ),
        "result.json.decisions look 2.gates.error.candidate_bad: 99, but",
    ),
    "the limit of a training gate": (
        json_change("result.json", put("training_gates", "T3 learned", "limit", value=0.9)),
        "result.json.training_gates T3 learned.limit: 0.9, but 0.7252 by training.json",
    ),
    "the value of the smoke test": (
        json_change("result.json", put("training_gates", "T10 smoke", "value", value=0.5)),
        "result.json.training_gates T10 smoke.value: 0.5, but",
    ),
    "a loss of the training": (
        json_change("training.json", put("metrics", "validation_loss", 3, value=0.1)),
        "result.json.training_gates T3 learned.value",
    ),
    "the rules of the training": (
        json_change("training.json", put("rule_version", value="0")),
        "training.json: this release cannot judge by rule version",
    ),
    "the wins of a grader": (
        json_change("result.json", put("evaluation", "graders", 0, "wins", value=77)),
        "result.json.evaluation.graders chapter.wins: 77, but",
    ),
    "a slice": (
        json_change("result.json", put("evaluation", "slices", 0, "examples", value=7)),
        "result.json.evaluation.slices[0].examples: 7, but",
    ),
    "the counts of the evaluation": (
        json_change("result.json", put("evaluation", "record", value="{}")),
        "result.json: cannot be read",
    ),
    "the outcome": (
        json_change("result.json", put("outcome", value="rolled_back")),
        "result.json.outcome: release.jsonl has no such end",
    ),
    "the run": (
        json_change("result.json", put("run_key", value="other")),
        "result.json.run_key: other, but",
    ),
    "the model": (
        json_change("result.json", put("model", value="ft:other")),
        "result.json.model: ft:other, but",
    ),
    "a gate in the record": (
        lines_change("release.jsonl", put("rollout", "gates", 0, "state", value="hold")),
        "result.json.training_gates T0 terminal.state: pass, but hold by release.jsonl",
    ),
    "the row of the head": (
        json_change("audit-head.jsonl", put("seq", value=1)),
        "audit-head.jsonl: its signature is not valid",
    ),
    "a head that is none": (
        json_change("audit-head.jsonl", put("signature", value="x")),
        "audit-head.jsonl: cannot be read",
    ),
    "no rollout": (without("rollout.jsonl"), "rollout.jsonl: by result.json it is missing"),
    "no report": (without("report.md"), "report.md: by result.json it is missing"),
    "no training": (without("training.json"), "training.json: by result.json it is missing"),
    "no picture": (without("loss.png"), "loss.png: report.md shows it"),
    "the model card": (
        json_change("model_card.json", put("model", "name", value="other")),
        "model_card.json: its SHA-256 is not the one in release.jsonl",
    ),
    **{
        f"{name} of the model card": (card_change(put(*path, value=value)), words)
        for name, path, value, words in (
            ("the model", ("model", "id"), "ft:other", ".model.id: ft:other, but"),
            (
                "the outcome",
                ("decisions", "outcome"),
                "rejected",
                ".decisions.outcome: rejected, but",
            ),
            ("the reason", ("decisions", "reason"), "other", ".decisions.reason: other, but none"),
            ("the run", ("decisions", "run_key"), "other", ".decisions.run_key: other, but"),
            (
                "a gate",
                ("decisions", "gates", "T3 learned", "limit"),
                0.9,
                ".decisions.gates T3 learned.limit: 0.9, but 0.7252 by result.json",
            ),
            ("every decision", ("decisions",), None, ".decisions.run_key: null, but"),
        )
    },
    "the text of the model card": (
        lambda members: members.update({"model_card.md": members["model_card.md"] + b"safe"}),
        "model_card.md: it does not say what model_card.json has",
    ),
    "no model card": (
        without("model_card.json"),
        "model_card.json: by result.json it is missing",
    ),
    "a card that the result does not name": (
        json_change("result.json", put("model_card", value=None)),
        "model_card.json: by result.json it does not belong",
    ),
}
