"""The model card of a release as JSON: what was measured, and what people state. Ids, counts and numbers, no data.

`docs/model_card.schema.json` is its published schema: `python -m tuneship.contract.model_card` prints it. Next:
`tuneship/cards/` makes a card and writes it as Markdown.
"""

import json
import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

from tuneship.contract.common import SignedInPerson, StrictModel, Timestamp
from tuneship.contract.evaluations import ExampleCounts, GraderReport, SliceReport

# Characters of one statement.
LONGEST_STATEMENT = 4000


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank: leave it out")
    return text


def _finite(value: Any) -> Any:
    """A loss that is not a number is not known: JSON has no word for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


StatementText = Annotated[
    str, Field(min_length=1, max_length=LONGEST_STATEMENT), AfterValidator(_not_blank)
]
Number = Annotated[float | None, BeforeValidator(_finite)]


def _stated(what: str) -> Any:
    return Field(default=None, description=what)


class Statements(StrictModel):
    """Statements that only people can make about a model; null: not stated. No patient data: a card is passed on."""

    developer: StatementText | None = _stated("Who makes the model.")
    contact: StatementText | None = _stated("How to reach them.")
    funding: StatementText | None = _stated("Who pays for making it.")
    output: StatementText | None = _stated("What its answers are.")
    output_type: (
        Literal["prediction", "classification", "recommendation", "evaluation", "analysis", "other"]
        | None
    ) = _stated("What kind of output its answers are.")
    intended_use: StatementText | None = _stated("What it is to be used for.")
    patient_population: StatementText | None = _stated("For which patients.")
    users: StatementText | None = _stated("By whom.")
    decision_role: Literal["informs", "augments", "replaces"] | None = _stated(
        "What its answers do to a clinical decision."
    )
    how_to_use: StatementText | None = _stated("How its users work with it.")
    out_of_scope: StatementText | None = _stated(
        "Tasks, situations and populations for which it must not be used."
    )
    known_risks: StatementText | None = _stated("Known risks, limitations, unfit settings.")
    clinical_risk: StatementText | None = _stated("The level of its clinical risk.")
    inclusion_criteria: StatementText | None = _stated(
        "Which records are in the training data, and which are left out."
    )
    variables: StatementText | None = _stated(
        "Which demographic, social and health-status variables it is given."
    )
    representativeness: StatementText | None = _stated(
        "How the people in the training data represent those by these variables."
    )
    relevance: StatementText | None = _stated("How these data fit the place where it serves.")
    fairness_approach: StatementText | None = _stated("How its output is kept fair.")
    bias_mitigation: StatementText | None = _stated("How bias is managed, reduced or removed.")
    external_data: StatementText | None = _stated(
        "On which other data, in which setting, it was tested."
    )
    external_party: StatementText | None = _stated("Who tested it there.")
    external_representativeness: StatementText | None = _stated(
        "How the people in those data represent the population."
    )
    external_validation: StatementText | None = _stated("How it was tested there.")
    external_validity: StatementText | None = _stated("How right its answers were there.")
    external_fairness: StatementText | None = _stated("How fair they were there.")
    references: StatementText | None = _stated("Publications on outcomes of its use.")
    monitoring: StatementText | None = _stated("How, and how often, its answers are checked.")
    fairness_monitoring: StatementText | None = _stated("The same for their fairness.")
    update_schedule: StatementText | None = _stated("How, and how often, it is updated.")
    correction_process: StatementText | None = _stated(
        "How soon it is corrected when a risk is found."
    )


class CardPart(BaseModel):
    """A part of the card; a null was not known to who made the card."""

    # Also the schema says so: a card of another form is no card.
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)


class MissingAttribute(CardPart):
    """A source attribute of HTI-1 about which the card says nothing."""

    number: str
    what: str
    fields: list[str] = Field(
        description="Fields of `model_card`, or sections, that would state it."
    )


class Completeness(CardPart):
    """How many of the source attributes of 45 CFR 170.315(b)(11)(iv)(B) the card states."""

    stated: int
    attributes: int
    missing: list[MissingAttribute]


class CardModel(CardPart):
    """The tuned model and its base model."""

    id: str | None = None
    name: str
    created_at: Timestamp | None = None
    is_imported: bool = Field(default=False, description="It was trained elsewhere.")
    base_model: str
    base_source: str | None = Field(default=None, description="The hub's id of the base model.")
    base_licence: str | None = None
    base_sha256: dict[str, str] = Field(
        default_factory=dict[str, str], description="Digest of each weight file of the base model."
    )


class CardDataset(CardPart):
    """A dataset of the training."""

    role: Literal["training", "validation"]
    id: str
    sha256: str | None = Field(default=None, description="Of the uploaded file.")
    examples: int | None = None
    tokens: int | None = None
    parents: list[str] = Field(default_factory=list[str], description="Datasets combined in it.")


class CardTraining(CardPart):
    """How the model was trained, as the service resolved it."""

    job_id: str
    status: str
    method: str
    hyperparameters: dict[str, JsonValue]
    steps: int
    started_at: Timestamp | None = None
    ended_at: Timestamp | None = None
    training_loss: Number = Field(default=None, description="Nats a token, at the end.")
    validation_loss: Number = Field(
        default=None, description="Of the checkpoint that is the model, nats a token."
    )
    ends_learnt: Number = Field(
        default=None, description="Share of the validation answers whose end was learnt."
    )
    devices: list[str] = Field(
        default_factory=list[str], description="GPUs; none: the processor, or not known."
    )
    instance_type: str | None = None


class CardGrader(GraderReport):
    """The findings of one grader, and what kind it is."""

    type: str | None = None


class ExactMatches(CardPart):
    """Rows that were answered exactly, where no grader was named; they decide nothing."""

    rows: int
    before: int = Field(description="By the model that serves.")
    after: int = Field(description="By the new model.")


class CardEvaluation(CardPart):
    """Answers to held-out examples, in counts; differences have 90 % intervals, scores 95 %."""

    evaluation_id: str | None = None
    dataset_id: str | None = None
    dataset_sha256: str | None = None
    rule_version: str | None = None
    sentence: str | None = None
    margin: Number = None
    min_slice: int | None = Field(default=None, description="Smaller slices are not tested.")
    examples: ExampleCounts | None = None
    leaks_checked: bool | None = Field(
        default=None, description="Whether examples were looked for in the training data."
    )
    used_before: int | None = Field(default=None, description="Earlier verdicts on the same set.")
    graders: list[CardGrader] = Field(default_factory=list[CardGrader])
    slices: list[SliceReport] = Field(default_factory=list[SliceReport])
    exact_matches: ExactMatches | None = None


class CardReading(CardPart):
    """A gate of the rollout when both deployments were last compared; `log_e_*` are natural logarithms."""

    name: str
    state: str
    candidate_requests: int = 0
    candidate_bad: int = 0
    baseline_requests: int = 0
    baseline_bad: int = 0
    log_e_harm: Number = None
    log_e_harm_limit: Number = None
    log_e_ok: Number = None
    log_e_ok_limit: Number = None


class SplitChange(CardPart):
    """A confirmed change of the traffic, in percent by deployment."""

    at: Timestamp | None = None
    weights: dict[str, int]
    why: str


class CardLatency(CardPart):
    """The baseline's latency, in ms or in ms an output token, that the candidate's was compared with."""

    typical_ms: float
    slow_ms: float
    very_slow_ms: float
    requests: int
    per_token: bool


class CardRollout(CardPart):
    """How the traffic moved."""

    rollout_id: str | None = None
    endpoint_id: str | None = None
    baseline_deployment_id: str | None = None
    candidate_deployment_id: str | None = None
    formula_version: str | None = None
    looks: int = 0
    changes: list[SplitChange] = Field(default_factory=list[SplitChange])
    gates: list[CardReading] = Field(default_factory=list[CardReading])
    latency: CardLatency | None = Field(default=None, description="Of the baseline.")
    requests: dict[str, int | float] = Field(
        default_factory=dict[str, int | float],
        description="Of the pipeline, by what became of them.",
    )
    lease_seconds: int | None = Field(
        default=None,
        description="After so long without the pipeline the service returns the traffic.",
    )


class CardPrivacy(CardPart):
    """Which protection the training had. There is no formal guarantee."""

    formal_guarantee: Literal["none"] = "none"
    compliance_mode: str | None = None
    network_isolation: bool | None = None
    encryption_level: str | None = None


class CardGate(CardPart):
    """A gate before any traffic moved."""

    name: str
    state: str
    value: Number = None
    limit: Number = None
    note: str = ""


class CardQuestion(CardPart):
    """A question to a person, and the answer."""

    about: list[str] = Field(description="The gates that held; none: promotion to all traffic.")
    decision: str
    approver: str = ""
    comment: str = ""
    at: Timestamp | None = None
    person: SignedInPerson | None = Field(
        default=None,
        description="The approver by issuer and subject; null: signed in by a key, or answered in Prefect.",
    )


class CardDecisions(CardPart):
    """The decisions of a release: by which rule, and by whom."""

    run_key: str
    outcome: str
    reason: str
    gate: str | None = None
    gates: list[CardGate]
    questions: list[CardQuestion] = Field(default_factory=list[CardQuestion])
    notes: list[str] = Field(default_factory=list[str])


class ModelCard(CardPart):
    """A model card: sections that are null, or empty, were not reached or are not known."""

    card_version: Literal[1] = 1
    made_at: Timestamp
    # Versions of the programs that made it, by name.
    versions: dict[str, str] = Field(default_factory=dict[str, str])
    completeness: Completeness
    model: CardModel
    statements: Statements
    data: list[CardDataset] = Field(default_factory=list[CardDataset])
    training: CardTraining | None = None
    evaluation: CardEvaluation | None = None
    rollout: CardRollout | None = None
    privacy: CardPrivacy = Field(default_factory=CardPrivacy)
    decisions: CardDecisions | None = None


def model_card_schema() -> str:
    """The JSON Schema of a card, as it is published."""
    schema = ModelCard.model_json_schema(mode="serialization")
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(model_card_schema())
