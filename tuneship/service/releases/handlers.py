"""Handlers of releases: they keep the lines of pipelines' records, each exactly once, and the answers of people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract import releases as contract
from tuneship.contract.common import render_time
from tuneship.contract.errors import (
    ErrorDetail,
    InvalidRequestError,
    PermissionDenied,
    QuotaExceeded,
    ResourceNotFound,
)
from tuneship.contract.releases import (
    GivenAnswer,
    LinesStored,
    Release,
    ReleaseAnswer,
    ReleaseCreate,
    ReleaseDeleted,
    ReleaseEvidence,
    ReleaseLinePage,
    ReleaseLines,
    ReleasePage,
    ReleaseStatus,
)
from tuneship.gates.record import Phase
from tuneship.service.access.hipaa import HIPAA, is_hipaa
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.context.lists import log_page, own_page
from tuneship.service.context.quotas import check_quota
from tuneship.service.releases.kept_lines import kept_line, without_comment
from tuneship.service.releases.release_state import ReleaseState, folded, point_of
from tuneship.store.database import rows, tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.database.listings import RELEASES
from tuneship.store.database.tables import ReleaseRow
from tuneship.store.records import api_key_records, release_records
from tuneship.store.records.outbox import emit

MOST_RELEASES, MOST_LINES, MOST_RECORDS = 10_000, 20_000, 100
MOST_POINTS = 400
# What a release is made of, and the table of each; the safeguards of these hold for the release, too.
_PARTS: dict[str, "tables.TypedTable[Any]"] = {
    "job_id": tables.jobs,
    "baseline_deployment_id": tables.deployments,
    "candidate_deployment_id": tables.deployments,
    "evaluation_id": tables.evaluations,
}


@serves(contract.create_release)
def create_release(context: Context, release: ReleaseCreate) -> Release:
    """Answer the release of the run that was announced before, or record a new one."""
    connection = context.transaction
    known = release_records.of_run(connection, context.client_id, release.run_key)
    if known is not None:
        context.touch(known)
        behind = _with_caller(context, known)
        rows.change(connection, tables.releases, known["id"], known["updated_at"], **behind)
        return _shown(context, own_release(context, known["id"]))
    check_quota(context, tables.releases, MOST_RELEASES, "releases")
    is_rollout = release.kind == "rollout"
    row = rows.insert(
        connection,
        tables.releases,
        {
            **release.model_dump(exclude={"links"}),
            "id": new_id("rel"),
            "client_id": context.client_id,
            "created_at": context.now,
            "updated_at": context.now,
            "tags": {},
            "status": ReleaseStatus.RUNNING,
            "stage": "canary" if is_rollout else "data",
            "announced_by": context.audit_facts.key_id,
            "links": {
                name: address
                for name, address in release.links.items()
                if address.startswith(("https://", "http://"))
            },
            "records": {},
            "security_settings": {"audit_logging": False, "compliance_mode": "none"},
        },
    )
    return _shown(context, row)


def _with_caller(context: Context, row: ReleaseRow) -> dict[str, str]:
    """The keys behind a release with that of the caller."""
    keys = row["announced_by"].split()
    return {"announced_by": " ".join(dict.fromkeys([*keys, context.audit_facts.key_id]))}


def own_release(context: Context, release_id: str) -> ReleaseRow:
    """The caller's release. Raises `ResourceNotFound`."""
    with context.read() as connection:
        row = rows.fetch(connection, tables.releases, release_id, client_id=context.client_id)
    if row is None:
        raise ResourceNotFound("there is no such release")
    context.touch(row)
    return row


@serves(contract.list_releases)
def list_releases(
    context: Context,
    limit: int = 20,
    offset: int = 0,
    status: ReleaseStatus | None = None,
    endpoint_id: str | None = None,
    run_key: str | None = None,
) -> ReleasePage:
    """Return a page of the caller's releases."""
    filters = rows.filters_of(
        tables.releases, status=status, endpoint_id=endpoint_id, run_key=run_key
    )
    page = own_page(context, RELEASES, filters, limit, offset)
    context.touch(*page.rows)
    return ReleasePage(
        releases=[_shown(context, row) for row in page.rows], pagination=page.pagination
    )


@serves(contract.get_release)
def get_release(context: Context, release_id: str) -> Release:
    """Return what its lines say so far."""
    return _shown(context, own_release(context, release_id))


@serves(contract.delete_release)
def delete_release(context: Context, release_id: str) -> ReleaseDeleted:
    """Remove the row and its lines."""
    connection = context.transaction
    row = own_release(context, release_id)
    if row["status"] != ReleaseStatus.ENDED:
        raise InvalidRequestError("the release has not ended", status=409)
    release_records.remove_lines(connection, row["id"])
    rows.remove(connection, tables.releases, row["id"])
    return ReleaseDeleted(id=row["id"])


@serves(contract.add_release_lines)
def add_release_lines(context: Context, release_id: str, added: ReleaseLines) -> LinesStored:
    """Store the lines that are new, fold them into the row, and announce a question or the end, in one transaction."""
    connection = context.transaction
    row = own_release(context, release_id)
    number = row["records"].get(added.record, 1)
    if added.first_line > number:
        detail = ErrorDetail("first_line", "gap", "the lines before it are missing", line=number)
        raise InvalidRequestError(
            f"line {number} of this record comes next", status=409, details=[detail]
        )
    fresh = added.lines[number - added.first_line :]
    if fresh:
        row = _with_lines(context, connection, row, added.record, number, fresh)
    given = (row["question"] or {}).get("answer")
    return LinesStored(
        next_line=row["records"][added.record],
        answer=None if given is None else GivenAnswer.model_validate(given),
    )


def _with_lines(
    context: Context,
    connection: sa.Connection,
    row: ReleaseRow,
    record: str,
    number: int,
    lines: Sequence[dict[str, Any]],
) -> ReleaseRow:
    if row["line_count"] + len(lines) > MOST_LINES:
        raise QuotaExceeded(f"a release may have {MOST_LINES} lines")
    if record not in row["records"] and len(row["records"]) >= MOST_RECORDS:
        raise QuotaExceeded(f"a release may have {MOST_RECORDS} records")
    before = state = ReleaseState.of(row)
    kept = [kept_line(record, line) for line in lines]
    for line in kept:
        state = folded(state, record, line, context.now)
    changed: dict[str, Any] = {
        **asdict(state),
        **_with_caller(context, row),
        "records": {**row["records"], record: number + len(lines)},
        "line_count": row["line_count"] + len(lines),
    }
    changed["security_settings"] = _safeguards(connection, {**row, **changed})
    rows.change(connection, tables.releases, row["id"], context.now, **changed)
    # Read again: it may have become one that this caller may not see.
    after = own_release(context, row["id"])
    if is_hipaa(after):
        kept = [without_comment(line) for line in kept]
        if not is_hipaa(row):
            _remove_comments(connection, row["id"])
    stored = [(line, point_of(line)) for line in kept]
    release_records.add_lines(connection, row["id"], (record, number), context.now, stored)
    _announce(connection, before, after, context.now)
    return after


def _safeguards(connection: sa.Connection, row: dict[str, Any]) -> dict[str, Any]:
    """The strictest settings of the release's parts; they are not loosened when a part is deleted."""
    found = [row["security_settings"]]
    for column, table in _PARTS.items():
        if row[column] is not None:
            part = rows.fetch(connection, table, row[column], client_id=row["client_id"])
            found += [part["security_settings"]] if part else []
    modes = {one.get("compliance_mode") for one in found}
    return {
        "audit_logging": any(one["audit_logging"] for one in found),
        "compliance_mode": HIPAA if HIPAA in modes else "none",
    }


def _remove_comments(connection: sa.Connection, release_id: str) -> None:
    """Blank what people wrote before it was known that the release is in hipaa mode."""
    for stored in release_records.lines_of(connection, release_id, looks=False):
        if stored["line"].get("comment"):
            blank = without_comment(stored["line"])
            release_records.rewrite(connection, stored["id"], blank)


def _announce(
    connection: sa.Connection, before: ReleaseState, after: ReleaseRow, now: datetime
) -> None:
    known = {
        "stage": after["stage"],
        "candidate_percentage": after["candidate_percentage"],
        "endpoint_id": after["endpoint_id"],
        "job_id": after["job_id"],
    }
    question = after["question"]
    if question is not None and question["id"] != (before.question or {}).get("id"):
        emit(connection, "release.waiting", after, now, **known)
    if after["status"] == ReleaseStatus.ENDED and not before.has_ended:
        ended = {"outcome": after["outcome"], "reason": after["reason"]}
        emit(connection, "release.ended", after, now, **known, **ended)


@serves(contract.list_release_lines)
def list_release_lines(
    context: Context,
    release_id: str,
    limit: int = 100,
    after: str | None = None,
    looks: bool = True,
) -> ReleaseLinePage:
    """Return stored lines in the order in which they came."""
    row = own_release(context, release_id)
    lines, cursor = log_page(
        context,
        row["id"],
        after,
        lambda connection, position: release_records.lines_of(
            connection, row["id"], after=position, limit=limit, looks=looks
        ),
        lambda one: one["id"],
    )
    return ReleaseLinePage.model_validate({"lines": lines, "pagination": cursor})


@serves(contract.get_release_evidence)
def get_release_evidence(context: Context, release_id: str) -> ReleaseEvidence:
    """Return the looks in short, and the newest one that compared, whole."""
    row = own_release(context, release_id)
    with context.read() as connection:
        looks, points = release_records.points_of(connection, row["id"], MOST_POINTS)
        last = release_records.last_comparison(connection, row["id"], Phase.SETTLE)
    return ReleaseEvidence.model_validate({"looks": looks, "points": points, "last_look": last})


@serves(contract.answer_release)
def answer_release(context: Context, release_id: str, answer: ReleaseAnswer) -> Release:
    """Keep the answer beside the question until the pipeline has recorded what came of it."""
    connection = context.transaction
    row = own_release(context, release_id)
    question = row["question"]
    if question is None or question["id"] != answer.question:
        raise InvalidRequestError("this question is not open", status=409)
    if question["until"] is not None and datetime.fromisoformat(question["until"]) <= context.now:
        raise InvalidRequestError("the time for an answer is over", status=409)
    if answer.decision not in _still_possible(question):
        raise InvalidRequestError("this question has an answer already", status=409)
    if answer.decision == "promote" and _needs_another_key(context, row):
        raise PermissionDenied("another person than the one who runs the release has to promote it")
    for field in ("reason", "ticket") if is_hipaa(row) else ():
        if getattr(answer, field) is None:
            raise field_error(field, "is required in the hipaa mode", "missing_field")
    kept = {
        **answer.model_dump(),
        "at": render_time(context.now),
    }
    # What a provider says about a person counts before what the person writes.
    if (person := context.audit_facts.person) is not None:
        kept |= {"name": person.name, "person": asdict(person)}
    question = {**question, "answer": kept}
    rows.change(connection, tables.releases, row["id"], context.now, question=question)
    return _shown(context, own_release(context, row["id"]))


def _needs_another_key(context: Context, row: ReleaseRow) -> bool:
    """Whether four eyes have to look and the caller's are those behind the release, also by another key of theirs."""
    if not (context.parts.settings.four_eyes or is_hipaa(row)):
        return False
    with context.read() as connection:
        own = _holder(connection, context.audit_facts.key_id)
        return any(own == _holder(connection, key) for key in row["announced_by"].split())


def _holder(connection: sa.Connection, key_id: str) -> tuple[str, ...]:
    """Who holds a key: the person that it stands for, else its label, which a rotated key inherits, else the key."""
    key = api_key_records.find(connection, key_id)
    if key is None or not (key["person"] or key["label"]):
        return (key_id,)
    if key["person"]:
        return key["person"]["issuer"], key["person"]["subject"]
    return (f"label {key['label']}",)


def _still_possible(question: Mapping[str, Any]) -> tuple[str, ...]:
    """The decisions that a question takes: whoever finds a reason to stop is heard after another person's yes, too."""
    if question["answer"] is None:
        return ("promote", "roll back")
    return ("roll back",) if question["answer"]["decision"] == "promote" else ()


def _shown(context: Context, row: ReleaseRow) -> Release:
    question = row["question"]
    if question is not None:
        may = contract.answer_release.scope in context.scopes
        refused = {"promote"} if _needs_another_key(context, row) else set[str]()
        allowed = [one for one in _still_possible(question) if may and one not in refused]
        question = {**question, "allowed": allowed, "needs_reason": is_hipaa(row)}
    return Release.model_validate({**row, "question": question})
