"""A model card as Markdown: Hugging Face's metadata, how complete it is, and a part for each section.

Every text of a person or of a model is escaped into one line.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tuneship.cards.canonical import canonical, card_sha256
from tuneship.cards.making import validity_of
from tuneship.cards.mapping import FIELDS
from tuneship.cards.markdown import code, number, plain, sentence, table
from tuneship.contract.common import render_time
from tuneship.contract.evaluations import GraderReport, PairedReport, Score
from tuneship.contract.model_card import CardQuestion, ModelCard, Statements

NOT_STATED = "not stated"
# JSON has these as they are; YAML refuses them, or takes them for the end of a line.
NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
# What an export adds to the metadata.
Metadata = dict[str, Any]


def as_markdown(card: ModelCard, more: Metadata | None = None, beside: Sequence[str] = ()) -> str:
    """The card as Markdown; `more` metadata and sections `beside` it are those of an export."""
    # As its JSON has it, with sorted names: whoever has the JSON can make the same text again.
    card = ModelCard.model_validate_json(canonical(card))
    lines = ["---"]
    lines += [f"{name}: {_yaml(value)}" for name, value in _metadata(card, more or {}).items()]
    lines += ["---", "", f"# {sentence(card.model.name)}", "", *_completeness(card)]
    for section in dict.fromkeys(one.section for one in FIELDS):
        named = [one.name for one in FIELDS if one.section == section and one.is_statement]
        lines += [f"## {section}", "", *_FACTS.get(section, _nothing)(card)]
        if named:
            lines += [*(_statement(card.statements, name) for name in named), ""]
    lines += [*beside, f"SHA-256 of this card as JSON: {code(card_sha256(card))}", ""]
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    """A value in one line of YAML, as JSON, which is YAML but for the two halves of an escaped character."""
    text = json.dumps(value, ensure_ascii=False)
    return NO_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _metadata(card: ModelCard, more: Metadata) -> Metadata:
    model = card.model
    fields: Metadata = {
        "base_model": model.base_source or model.base_model,
        "base_model_relation": "adapter",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "tuneship"],
    }
    if model.base_licence:
        fields["license"] = model.base_licence
    if results := _results(card):
        fields["model-index"] = [{"name": model.name, "results": [results]}]
    return fields | more


def _results(card: ModelCard) -> Metadata | None:
    """The scores of the new model in the form of Hugging Face's `model-index`."""
    found = card.evaluation
    if found is None:
        return None
    graders, matches = validity_of(found)
    metrics: list[Metadata] = [
        {"type": one.type or one.measure, "name": one.name, "value": one.candidate.score}
        for one in graders
        if one.candidate
    ]
    if matches:
        metrics.append(
            {"type": "exact_match", "name": "exact match", "value": matches.after / matches.rows}
        )
    if not metrics:
        return None
    dataset = found.dataset_id or "not known"
    return {
        "task": {"type": "text-generation"},
        "dataset": {"type": dataset, "name": dataset},
        "metrics": metrics,
    }


def _completeness(card: ModelCard) -> list[str]:
    whole = card.completeness
    counted = f"**{whole.stated} of {whole.attributes} HTI-1 source attributes stated**"
    lines = [f"{counted} (45 CFR 170.315(b)(11)(iv)(B)).", ""]
    if whole.missing:
        lines += ["Missing:", ""]
        lines += [
            f"- {one.number}: {one.what} ({', '.join(map(code, one.fields))})"
            for one in whole.missing
        ]
        lines.append("")
    return lines


def _statement(statements: Statements, name: str) -> str:
    value = getattr(statements, name)
    said = NOT_STATED if value is None else plain(value)
    return f"- **{name.replace('_', ' ')}**: {said}"


def _nothing(_: ModelCard) -> Iterator[str]:
    yield from ()


def _facts(rows: dict[str, Any]) -> Iterator[str]:
    known = [(what, _shown(value)) for what, value in rows.items() if value not in (None, "", [])]
    if known:
        yield from (table(("what", "value"), known), "")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def _model(card: ModelCard) -> Iterator[str]:
    model, decided = card.model, card.decisions
    licence = model.base_licence or "not named by its source; ask for it before you pass this on"
    yield from _facts(
        {
            "model": model.id,
            "outcome of its release": decided.outcome if decided else None,
            "made": render_time(model.created_at) if model.created_at else None,
            "base model": model.base_model,
            "source of the base model": model.base_source,
            "licence of the base model": licence,
            **{f"SHA-256 of the base's {name}": one for name, one in model.base_sha256.items()},
            "card made": render_time(card.made_at),
            **{f"version of {name}": version for name, version in card.versions.items()},
        }
    )


def _data(card: ModelCard) -> Iterator[str]:
    titles = ("dataset", "id", "examples", "tokens", "SHA-256", "combined from")
    if not card.data:
        yield from ("The training data are not known here.", "")
        return
    rows = [
        [
            one.role,
            one.id,
            "not known" if one.examples is None else one.examples,
            "not known" if one.tokens is None else one.tokens,
            one.sha256 or "not known",
            ", ".join(one.parents) or "-",
        ]
        for one in card.data
    ]
    yield from (table(titles, rows), "")


def _training(card: ModelCard) -> Iterator[str]:
    trained = card.training
    if trained is None:
        where = "It was trained elsewhere and imported: h" if card.model.is_imported else "H"
        yield from (f"{where}ow it was trained is not known here.", "")
        return
    yield from _facts(
        {
            "job": trained.job_id,
            "state": trained.status,
            "method": trained.method,
            "steps": trained.steps,
            "began": render_time(trained.started_at) if trained.started_at else None,
            "ended": render_time(trained.ended_at) if trained.ended_at else None,
            "training loss": trained.training_loss,
            "validation loss": trained.validation_loss,
            "ends learnt": trained.ends_learnt,
            "devices": ", ".join(trained.devices),
            "instance type": trained.instance_type,
        }
    )
    settings = [[name, json.dumps(one)] for name, one in sorted(trained.hyperparameters.items())]
    if settings:
        yield from (table(("hyperparameter", "value"), settings), "")


def _fairness(card: ModelCard) -> Iterator[str]:
    slices = card.evaluation.slices if card.evaluation else []
    if not slices:
        yield from ("No slices were compared.", "")
        return
    rows = [
        [
            f"{one.field} {one.value}",
            one.grader,
            one.examples,
            interval(one),
            one.verdict.replace("_", " "),
        ]
        for one in slices
    ]
    titles = ("slice", "grader", "examples", "difference in points [90 %]", "")
    yield from (table(titles, rows), "")


def _evaluation(card: ModelCard) -> Iterator[str]:
    found = card.evaluation
    if found is None:
        yield from ("The answers were not evaluated.", "")
        return
    if found.sentence:
        yield from (sentence(found.sentence), "")
    counts, matches = found.examples, found.exact_matches
    yield from _facts(
        {
            "evaluation": found.evaluation_id,
            "dataset": found.dataset_id,
            "SHA-256 of the dataset": found.dataset_sha256,
            "margin": found.margin,
            "examples scored": counts.scored if counts else None,
            "left out as leaked": counts.leaked if counts else None,
            "left out as failed or too long": counts.failed + counts.too_long if counts else None,
            "leaked examples looked for": found.leaks_checked,
            "earlier verdicts on the same set": found.used_before,
            "exact match before": f"{matches.before} of {matches.rows}" if matches else None,
            "exact match after": f"{matches.after} of {matches.rows}" if matches else None,
        }
    )
    if found.graders:
        rows = [
            [
                one.name,
                one.type or "-",
                _score(one, one.candidate),
                _score(one, one.baseline),
                number(one.wins),
                number(one.losses),
                interval(one),
                one.verdict or "reported",
            ]
            for one in found.graders
        ]
        titles = ("grader", "type", "score in % [95 %]", "of the model before", "wins", "losses")
        more = ("difference in points [90 %]", "verdict")
        yield from (table((*titles, *more), rows), "")


def _score(grader: GraderReport, one: Score | None) -> str:
    if one is None:
        return "-"
    if grader.measure == "loss":
        return f"{one.score:.4f} [{one.low:.4f}, {one.high:.4f}] nats, lower is better"
    return f"{100 * one.score:.1f} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def interval(one: PairedReport) -> str:
    """A difference with its interval, in points, or in nats for losses; a dash without one."""
    if one.difference is None or one.low is None or one.high is None:
        return "-"
    if isinstance(one, GraderReport) and one.measure == "loss":
        return f"{one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}] nats"
    return f"{100 * one.difference:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]"


def _privacy(card: ModelCard) -> Iterator[str]:
    privacy = card.privacy
    yield from ("There is no formal guarantee of privacy.", "")
    yield from _facts(
        {
            "compliance mode": privacy.compliance_mode,
            "training without a network": privacy.network_isolation,
            "encryption": privacy.encryption_level,
        }
    )


def _rollout(card: ModelCard) -> Iterator[str]:
    moved = card.rollout
    if moved is None:
        yield from ("No traffic moved.", "")
        return
    latency = moved.latency
    unit = "ms a token" if latency and latency.per_token else "ms"
    yield from _facts(
        {
            "endpoint": moved.endpoint_id,
            "deployment": moved.candidate_deployment_id,
            "looks": moved.looks,
            "latency of the model before": f"median {latency.typical_ms:.4g}, p95 {latency.slow_ms:.4g} {unit}"
            if latency
            else None,
            **{f"requests of the pipeline, {name}": one for name, one in moved.requests.items()},
        }
    )
    if moved.gates:
        rows = [
            [
                one.name,
                one.state,
                f"{one.candidate_bad} of {one.candidate_requests}",
                f"{one.baseline_bad} of {one.baseline_requests}",
                f"{number(one.log_e_harm)} ({number(one.log_e_harm_limit)})",
                f"{number(one.log_e_ok)} ({number(one.log_e_ok_limit)})",
            ]
            for one in moved.gates
        ]
        evidence = ("harm: ln E (limit)", "proof: ln E (limit)")
        yield from (table(("gate", "state", "new model", "model before", *evidence), rows), "")
    if moved.changes:
        rows = [
            [
                render_time(one.at) if one.at else "start",
                ", ".join(f"{who} {share} %" for who, share in one.weights.items()),
                one.why,
            ]
            for one in moved.changes
        ]
        yield from (table(("time", "split", "why"), rows), "")


def _decisions(card: ModelCard) -> Iterator[str]:
    decided = card.decisions
    if decided is None:
        yield from ("No release is known here.", "")
        return
    yield from _facts(
        {
            "outcome": decided.outcome,
            "reason": decided.reason,
            "gate": decided.gate,
            "run": decided.run_key,
        }
    )
    if decided.gates:
        rows = [
            [one.name, one.state, number(one.value), number(one.limit), one.note]
            for one in decided.gates
        ]
        yield from (table(("gate", "state", "value", "limit", "note"), rows), "")
    if decided.questions:
        rows = [
            [
                ", ".join(one.about) or "promotion",
                one.decision,
                _approver(one),
                render_time(one.at) if one.at else "-",
                one.comment or "-",
            ]
            for one in decided.questions
        ]
        yield from (table(("question", "answer", "by", "when", "why"), rows), "")
    if decided.notes:
        yield from (*(f"- {sentence(note)}" for note in decided.notes), "")


def _maintenance(card: ModelCard) -> Iterator[str]:
    seconds = card.rollout.lease_seconds if card.rollout else None
    if seconds is not None:
        silent = f"The service returns the traffic after {seconds} s without the pipeline"
        yield from (f"{silent}, until the rollout has ended.", "")


def _approver(one: CardQuestion) -> str:
    person = one.person
    return (
        f"{one.approver} ({person.subject} at {person.issuer})" if person else one.approver or "-"
    )


_FACTS: dict[str, Callable[[ModelCard], Iterator[str]]] = {
    "Model": _model,
    "Data": _data,
    "Training": _training,
    "Fairness": _fairness,
    "Evaluation": _evaluation,
    "Rollout": _rollout,
    "Privacy": _privacy,
    "Decisions": _decisions,
    "Maintenance": _maintenance,
}
