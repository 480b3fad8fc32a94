"""The model card of an export: where a tuned model comes from, in the form of a hub's README. Pure.

It holds ids, digests, counts and numbers, and nothing of the data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneship.conversion.order import ExportOrder, ExportReport
from tuneship.gates.record import Phase

LIBRARIES = {"peft": "peft", "merged": "transformers", "gguf": "gguf"}


@dataclass(frozen=True)
class DatasetFacts:
    """A dataset of the training; null where it is gone."""

    # `training` or `validation`.
    role: str
    id: str
    examples: int | None = None
    tokens: int | None = None
    # The digest of its JSON Lines.
    sha256: str | None = None


@dataclass(frozen=True)
class CardFacts:
    """The origin of a tuned model, as far as the installation knows it."""

    id: str
    name: str
    created: str
    base: str
    # The hub's id, directory or file that the base model was added from.
    base_source: str | None = None
    base_licence: str | None = None
    # Digest of each weight file of the base model.
    base_sha256: Mapping[str, str] = field(default_factory=dict[str, str])
    method: str = "lora"
    # The row of the job that trained it; None for one that was trained elsewhere.
    job: Mapping[str, Any] | None = None
    datasets: Sequence[DatasetFacts] = ()
    # Those of `release_gates`.
    gates: Sequence[Mapping[str, Any]] = ()


def card(facts: CardFacts, order: ExportOrder, report: ExportReport) -> str:
    """The text of the README."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    checked = (
        f"Format {order.format}, weights in {report.number_format}. It was read back and compared with the service's "
        f"engine: over fixed texts the logits differ by {report.difference:.2g} of their standard deviation "
        f"({report.allowed:g} is allowed). Written and read with {versions}."
    )
    fields: dict[str, Any] = {
        "base_model": facts.base_source or facts.base,
        "library_name": LIBRARIES[order.format],
        "pipeline_tag": "text-generation",
        "tags": ["lora", "tuneship"],
    }
    if facts.base_licence:
        fields["license"] = facts.base_licence
    return "\n".join(
        [
            "---",
            # JSON is YAML, and leaves nothing to quote.
            *(f"{name}: {json.dumps(value)}" for name, value in fields.items()),
            "---",
            "",
            f"# {facts.name}",
            "",
            f"Tuned by LoRA from `{facts.base}`, exported by tuneship.",
            "",
            *_origin(facts),
            *_training(facts),
            *_gates(facts),
            "## This export",
            "",
            checked,
            "",
        ]
    )


def _origin(facts: CardFacts) -> list[str]:
    licence = facts.base_licence or "not named by its source; ask for it before you pass this on"
    digests = [
        f"| SHA-256 of the base's `{name}` | `{one}` |" for name, one in facts.base_sha256.items()
    ]
    return [
        "## Where it comes from",
        "",
        "| | |",
        "|---|---|",
        f"| model | `{facts.id}` |",
        f"| made | {facts.created} |",
        f"| base model | `{facts.base}`{f', from `{facts.base_source}`' if facts.base_source else ''} |",
        f"| licence of the base model | {licence} |",
        *digests,
        "",
    ]


def _training(facts: CardFacts) -> list[str]:
    if facts.job is None:
        return ["It was trained elsewhere and imported: data and settings are not known here.", ""]
    rows = [
        f"| {one.role} | `{one.id}` | {_shown(one.examples)} | {_shown(one.tokens)} | "
        f"{f'`{one.sha256}`' if one.sha256 else 'deleted'} |"
        for one in facts.datasets
    ]
    settings = [
        f"| {name} | {json.dumps(value)} |"
        for name, value in sorted(facts.job["hyperparameters"].items())
    ]
    loss = facts.job["validation_loss"]
    return [
        "## Training",
        "",
        "| dataset | id | examples | tokens | SHA-256 of its lines |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"Job `{facts.job['id']}`, {facts.job['total_steps']} steps, method {facts.method}"
        + ("." if loss is None else f", best validation loss {loss:.4f}."),
        "",
        "| hyperparameter | value |",
        "|---|---|",
        *settings,
        "",
    ]


def _shown(number: int | None) -> str:
    return "not known" if number is None else str(number)


def release_gates(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The gates of a release as its result file has them, each with its name, its state and its numbers.

    Those of the training come first, then those of the last look at both deployments. Raises KeyError, TypeError and
    AttributeError for what is no such file.
    """
    # After a bake the looks see traffic of the candidate only.
    compared = [look["gates"] for look in result["decisions"] if look["phase"] != Phase.SETTLE]
    last: Mapping[str, Mapping[str, Any]] = compared[-1] if compared else {}
    return [*map(dict, result["training_gates"]), *({"name": one, **last[one]} for one in last)]


def _gates(facts: CardFacts) -> list[str]:
    if not facts.gates:
        return []
    rows: list[str] = []
    for gate in facts.gates:
        # Its texts are for the report of the release.
        numbers = {name: one for name, one in gate.items() if isinstance(one, int | float)}
        shown = ", ".join(f"{name} {one:.4g}" for name, one in numbers.items())
        rows.append(f"| {gate['name']} | {gate['state']} | {shown} |")
    return [
        "## Gates of its release",
        "",
        "| gate | state | numbers |",
        "|---|---|---|",
        *rows,
        "",
    ]
