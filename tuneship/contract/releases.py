"""Releases on the wire (additive): what a pipeline has recorded about a release, and what a person decides.

The pipeline's record is the truth: a service that cannot be reached stops no release. Lines hold ids, numbers and
words of tuneship, never a text of a dataset, a prompt or an answer.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from tuneship.contract.common import (
    ONE_LINE,
    AnyEndpointId,
    CreateRequest,
    DecisionReason,
    Deleted,
    Limit,
    LogCursor,
    LogLimit,
    Offset,
    Pagination,
    PersonName,
    ReleaseId,
    Reply,
    SignedInPerson,
    Ticket,
    Timestamp,
    TimestampMs,
)
from tuneship.contract.declaring.examples import (
    CANARY,
    JOB,
    LATER,
    MODEL,
    NOON,
    NOON_MS,
    PAGE,
    RELEASE,
)
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_after
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb
from tuneship.contract.errors import InvalidRequestError, PermissionDenied, QuotaExceeded

MAX_LINES = 100

RunKey = Annotated[str, Field(min_length=1, max_length=128, pattern=ONE_LINE)]
Shown = Annotated[str, Field(max_length=256, pattern=ONE_LINE)]
RecordName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}-[0-9a-f]{8}$",
        description="The record's file name without its ending, and 8 digits of the SHA-256 of its first line.",
    ),
]
Decision = Literal["promote", "roll back"]


class ReleaseStatus(StrEnum):
    """States of a release. `waiting`: a question to a person is open. `paused`: undecided; it may continue."""

    RUNNING = "running"
    WAITING = "waiting"
    PAUSED = "paused"
    ENDED = "ended"


class ReleaseCreate(CreateRequest):
    """A release as a pipeline announces it."""

    run_key: RunKey = Field(
        description="Names the run; announcing it again answers the same release."
    )
    kind: Literal["release", "rollout"] = Field(
        description="`release`: the whole chain; `rollout`: a shift of traffic between two given deployments."
    )
    model_name: Shown | None = None
    endpoint_name: Shown | None = None
    endpoint_id: AnyEndpointId | None = None
    links: dict[
        Literal["prefect_run"], Annotated[str, Field(max_length=2048, pattern=ONE_LINE)]
    ] = Field(
        default_factory=dict[Literal["prefect_run"], str],
        description="Addresses for people. Only http and https are kept.",
    )


class ReleaseLines(CreateRequest):
    """Lines of one record, in its order and without a gap. Known lines are skipped."""

    record: RecordName
    first_line: Annotated[
        int, Field(ge=1, le=20_000, description="The number of the first line sent.")
    ]
    lines: Annotated[
        list[dict[str, Any]],
        Field(
            min_length=1,
            max_length=MAX_LINES,
            description="Each has a `kind`. Known fields of known kinds are kept; of other kinds only kind and time.",
        ),
    ]


class ReleaseAnswer(CreateRequest):
    """A person's answer to the open question of a release."""

    question: Annotated[str, Field(min_length=1, max_length=128, pattern=ONE_LINE)]
    decision: Decision
    name: Annotated[
        PersonName,
        Field(
            description="Who decides. Of somebody who signed in by OpenID Connect, the provider's name is kept."
        ),
    ]
    reason: DecisionReason | None = Field(default=None, description="Required in the hipaa mode.")
    ticket: Ticket | None = Field(default=None, description="Required in the hipaa mode.")


class GivenAnswer(Reply):
    """An answer that was given here, a proposal until the pipeline has recorded it.

    `person`: who signed in by OpenID Connect; null where a key was used.
    """

    question: str
    decision: str
    name: str
    reason: str | None = None
    ticket: str | None = None
    at: Timestamp
    person: SignedInPerson | None = None


class ReleaseQuestion(Reply):
    """The open question of a release. `asks`: `promotion`, or the gates that hold."""

    id: str
    asks: list[str]
    until: Timestamp | None
    allowed: list[str] = Field(
        description="The decisions that the calling key may give: without `promote` where another person's key has to, "
        "and none without the scope."
    )
    needs_reason: bool = Field(description="Reason and ticket are required: the hipaa mode.")
    answer: GivenAnswer | None


class Release(Reply):
    """A release, folded from the lines of its record and of its rollouts' records."""

    id: str
    run_key: str
    kind: str
    status: str
    stage: str = Field(
        description="`data`, `training`, `training_gates`, `deployment`, `smoke_test`, `evaluation`, `canary`, "
        "`approval`, `bake` or `ended`."
    )
    model_name: str | None
    endpoint_name: str | None
    endpoint_id: str | None
    job_id: str | None
    baseline_deployment_id: str | None
    candidate_deployment_id: str | None
    evaluation_id: str | None
    candidate_percentage: int | None
    outcome: str | None
    reason: str | None
    question: ReleaseQuestion | None
    links: dict[str, str]
    created_at: Timestamp
    updated_at: Timestamp
    ended_at: Timestamp | None
    records: dict[str, int] = Field(
        description="For each record of this release the number of its next line."
    )


class ReleasePage(Reply):
    """One page of releases, newest first."""

    releases: list[Release]
    pagination: Pagination


class ReleaseLine(Reply):
    """One stored line. `at`: when the service stored it."""

    record: str
    number: int
    at: TimestampMs
    line: dict[str, Any]


class ReleaseLinePage(Reply):
    """Lines of a release in the order in which they were stored."""

    lines: list[ReleaseLine]
    pagination: LogCursor


class LookPoint(Reply):
    """One check (look) in short, for charts."""

    number: int
    at: Timestamp | None
    weight: int
    phase: str
    verdict: str
    reason: str
    gates: dict[str, tuple[float | None, float | None]] = Field(
        description="For each gate its evidence that the candidate is within the limit, and that it is beyond: ln E "
        "over its threshold, so that 1 decides."
    )


class ReleaseEvidence(Reply):
    """The findings of the checks of both deployments. Of many checks a part is shown, always with the newest."""

    looks: int
    points: list[LookPoint]
    last_look: dict[str, Any] | None = Field(
        description="The newest check of both deployments, whole: counts, values and limits of its gates. Checks after "
        "a bake see the candidate alone."
    )


class LinesStored(Reply):
    """`next_line`: where the record continues. `answer`: the answer to the open question, if one was given."""

    next_line: int
    answer: GivenAnswer | None


class ReleaseDeleted(Deleted):
    """The reply to a delete."""


# Examples of the OpenAPI document.
RECORD = "3f9a1c2b4d5e6f70-1-9f2c41d7"
EXAMPLE_ANSWER = {
    "question": "7c1e5b0a",
    "decision": "promote",
    "name": "A. Reviewer",
    "reason": "evidence",
    "ticket": "CHG-1042",
}
EXAMPLE_PERSON = {
    "issuer": "https://login.clinic.example/realms/clinic",
    "subject": "8d1f0c3a",
    "name": "A. Reviewer",
}
EXAMPLE_RELEASE = {
    "id": RELEASE,
    "run_key": "icd-release-7",
    "kind": "release",
    "status": "running",
    "stage": "training",
    "model_name": MODEL,
    "endpoint_name": "icd",
    "endpoint_id": CANARY,
    "job_id": JOB,
    "baseline_deployment_id": None,
    "candidate_deployment_id": None,
    "evaluation_id": None,
    "candidate_percentage": None,
    "outcome": None,
    "reason": None,
    "question": None,
    "links": {},
    "created_at": NOON,
    "updated_at": LATER,
    "ended_at": None,
    "records": {RECORD: 3},
}


@operation(
    "POST",
    "/v1/releases",
    scope="releases:write",
    status=201,
    errors=(QuotaExceeded,),
    example=Example(
        {"a release": {"run_key": "icd-release-7", "kind": "release", "endpoint_name": "icd"}},
        EXAMPLE_RELEASE,
    ),
)
def create_release(release: ReleaseCreate) -> Release:
    """Announce a release, once for each run key (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/releases",
    scope="releases:read",
    example=Example(reply={"releases": [EXAMPLE_RELEASE], "pagination": PAGE}),
)
def list_releases(
    limit: Limit = 20,
    offset: Offset = 0,
    status: ReleaseStatus | None = None,
    endpoint_id: AnyEndpointId | None = None,
    run_key: RunKey | None = None,
) -> ReleasePage:
    """List releases, newest first (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/releases/{release_id}",
    scope="releases:read",
    example=Example(reply=EXAMPLE_RELEASE),
)
def get_release(release_id: ReleaseId) -> Release:
    """Fetch one release (additive)."""
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/releases/{release_id}",
    scope="releases:write",
    errors=((InvalidRequestError, 409),),
    example=Example(reply={"id": RELEASE, "deleted": True}),
)
def delete_release(release_id: ReleaseId) -> ReleaseDeleted:
    """Delete a release that has ended, with its lines; 409 before its end (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/releases/{release_id}/lines",
    scope="releases:write",
    errors=((InvalidRequestError, 409), QuotaExceeded),
    # A look has some 350.
    most_values=50_000,
    example=Example(
        {
            "a line": {
                "record": RECORD,
                "first_line": 1,
                "lines": [{"kind": "begun", "at": NOON}],
            }
        },
        {"next_line": 2, "answer": None},
    ),
)
def add_release_lines(release_id: ReleaseId, added: ReleaseLines) -> LinesStored:
    """Store the next lines of a record, each exactly once (additive).

    Known lines are skipped. 409 for a gap: the one of `details` has the code `gap`, and in `line` the number of the
    line that comes next.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/releases/{release_id}/lines",
    scope="releases:read",
    example=Example(
        reply={
            "lines": [
                {
                    "record": RECORD,
                    "number": 1,
                    "at": NOON_MS,
                    "line": {"kind": "begun", "at": NOON},
                }
            ],
            "pagination": {"after": "MQ"},
        }
    ),
)
def list_release_lines(
    release_id: ReleaseId, limit: LogLimit = 100, after: str | None = None, looks: bool = True
) -> ReleaseLinePage:
    """List the stored lines of a release, oldest first (additive). `looks=false` leaves out checks and probes."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/releases/{release_id}/evidence",
    scope="releases:read",
    example=Example(
        reply={
            "looks": 1,
            "points": [
                {
                    "number": 1,
                    "at": NOON,
                    "weight": 25,
                    "phase": "compare",
                    "verdict": "hold",
                    "reason": "dwell",
                    "gates": {"error": [0.42, 0.0]},
                }
            ],
            "last_look": {"kind": "look", "number": 1, "weight": 25, "verdict": "hold"},
        }
    ),
)
def get_release_evidence(release_id: ReleaseId) -> ReleaseEvidence:
    """Fetch the evidence of a release's rollout, check by check (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/releases/{release_id}/answer",
    scope="releases:decide",
    errors=(PermissionDenied, (InvalidRequestError, 409)),
    example=Example(
        {"promote": EXAMPLE_ANSWER},
        {
            **EXAMPLE_RELEASE,
            "status": "waiting",
            "stage": "approval",
            "question": {
                "id": "7c1e5b0a",
                "asks": ["promotion"],
                "until": LATER,
                "allowed": ["promote", "roll back"],
                "needs_reason": False,
                "answer": {**EXAMPLE_ANSWER, "at": NOON, "person": EXAMPLE_PERSON},
            },
        },
    ),
)
def answer_release(release_id: ReleaseId, answer: ReleaseAnswer) -> Release:
    """Answer the open question of a release; the pipeline acts on it at its next check (additive).

    409 where no question is open, or another one is. 403 for a promotion by the holder of a key that announced the
    release or sent its lines, where the installation asks for four eyes or the release is in the hipaa mode.
    """
    raise NotImplementedError


class Releases(Resource[C_co]):
    """Records that pipelines keep of their releases, and the decisions of people."""

    create = Verb(create_release)
    get = Verb(get_release)
    list = Verb(list_releases)
    iterate = Pages(list_releases, lambda page: page.releases)
    delete = Verb(delete_release)
    add_lines = Verb(add_release_lines)
    lines = Verb(list_release_lines)
    iterate_lines = Pages(list_release_lines, lambda page: page.lines, by_after)
    evidence = Verb(get_release_evidence)
    answer = Verb(answer_release)
