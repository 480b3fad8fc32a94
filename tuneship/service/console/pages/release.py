"""One release: what is happening, how far it is, the evidence of its gates, the question, and who did what."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, TypeVar

from tuneship.contract.common import ReleaseId
from tuneship.contract.declaring.operation import Operation
from tuneship.contract.deployments import Deployment, get_deployment
from tuneship.contract.endpoints import get_endpoint
from tuneship.contract.errors import ResourceNotFound
from tuneship.contract.evaluations import Evaluation, get_evaluation
from tuneship.contract.jobs import Job, get_job
from tuneship.contract.releases import Release, ReleaseEvidence, ReleaseLine
from tuneship.service.console import release_words
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient
from tuneship.service.console.pages.endpoint import EndpointView
from tuneship.service.console.pages.endpoint import endpoint as endpoint_view
from tuneship.service.console.words import count, duration

R = TypeVar("R")
LINES_PAGE = 1000
LOOKS_SHOWN, EVENTS_SHOWN = 12, 200
# Where a chart of evidence is cut off.
MOST = 1.25
# The kind of line that shows that a stage was reached.
_REACHED_BY = {
    "data": "data",
    "training": "job",
    "training_gates": "training_gates",
    "deployment": "candidate",
    "smoke_test": "smoke_test",
    "evaluation": "evaluation",
    "canary": "split_confirmed",
    "approval": "approval_asked",
}
_OF_ROLLOUTS = ("canary", "approval", "bake")


@dataclass
class ReleaseStory:
    """The course of a release by its lines, except for the looks; it grows with each line."""

    # The plan of the newest rollout; empty before it began.
    plan: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # The newest line of each kind.
    newest: dict[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    # Each share that the candidate has had in the newest rollout, and since when.
    reached: dict[int, datetime] = field(default_factory=dict[int, datetime])
    # The newest events in words, newest first, and how many there were.
    timeline: deque[tuple[datetime, str]] = field(
        default_factory=lambda: deque[tuple[datetime, str]](maxlen=EVENTS_SHOWN)
    )
    events: int = 0
    # Behind the last line that was read.
    after: str | None = None

    def add(self, one: ReleaseLine) -> None:
        """Go on with the next line."""
        kind, moment = one.line["kind"], _moment(one)
        self.newest[kind] = one.line
        if "plan" in one.line:
            self.plan = one.line["plan"]
            self.reached.clear()
        if kind == "split_confirmed":
            self.reached.setdefault(one.line["candidate_weight"], moment)
        text = release_words.line_in_words(one.line)
        # Both records of a release say that it has ended.
        if text and not (self.timeline and self.timeline[0][1] == text):
            self.timeline.appendleft((moment, text))
            self.events += 1


@dataclass(frozen=True)
class StageView:
    """One stage of the rail: a glyph, its name and a note."""

    state: str
    name: str
    note: str


@dataclass(frozen=True)
class ReleaseView:
    """A release; parts are None where they are gone, or this session may not read them."""

    release: Release
    story: ReleaseStory
    evidence: ReleaseEvidence
    endpoint: EndpointView | None
    baseline: Deployment | None
    candidate: Deployment | None
    job: Job | None
    evaluation: Evaluation | None

    @property
    def name(self) -> str:
        """The model that is released, or the run where that has no name yet."""
        return self.release.model_name or self.release.run_key

    @property
    def says(self) -> tuple[str, str]:
        """The sentence of the page, in two parts."""
        look: Mapping[str, Any] | None = self.look
        if look is not None and self.evidence.points:
            # Later ones may have looked at the candidate alone, which has all traffic.
            newest = self.evidence.points[-1]
            of_newest = {"verdict": newest.verdict, "weight": newest.weight}
            look = {**look, **of_newest, "reason": newest.reason, "reasons": []}
        return release_words.sentence(self.release, look)

    @property
    def look(self) -> Mapping[str, Any] | None:
        """The newest look at both deployments."""
        return self.evidence.last_look

    @property
    def gates(self) -> list[Mapping[str, Any]]:
        """The gates that tested at the newest look at both deployments."""
        return [gate for gate in self._all_gates if release_words.tests(gate)]

    @property
    def switched_off(self) -> list[str]:
        """The other gates, by name."""
        off = (gate["name"] for gate in self._all_gates if not release_words.tests(gate))
        names = [release_words.gate_name(name) for name in off]
        return [name[:1].lower() + name[1:] for name in names]

    @property
    def _all_gates(self) -> list[Mapping[str, Any]]:
        return self.look["gates"] if self.look else []

    @property
    def newest(self) -> Mapping[str, Mapping[str, Any]]:
        """The newest line of each kind."""
        return self.story.newest

    @property
    def steps(self) -> list[tuple[int, datetime | None]]:
        """The steps of the newest rollout's plan, with the time at which each was reached."""
        reached = self.story.reached
        weights = {*release_words.steps_of(self.story.plan), *reached} - {0}
        return [(weight, reached.get(weight)) for weight in sorted(weights)]

    def stages(self, now: datetime) -> list[StageView]:
        """The rail: what is done, what is at work, and what will follow."""
        names = [one for one in release_words.STAGES if one != "ended"]
        if self.release.kind == "rollout":
            names = [one for one in names if one in _OF_ROLLOUTS]
        has_ended = self.release.status == "ended"
        at = self._furthest(names) if has_ended else self._place(names)
        is_good = self.release.outcome == "promoted"
        made: list[StageView] = []
        for place, name in enumerate(names):
            kind = _REACHED_BY.get(name)
            was_made = kind is None or kind in self.newest
            state = "proven" if was_made else "open"
            if place > at:
                state = "open" if has_ended else "next"
            elif place == at:
                state = ("proven" if is_good else "harm") if has_ended else "now"
            made.append(StageView(state, release_words.STAGES[name], self._note(name, state, now)))
        return made

    def _place(self, names: list[str]) -> int:
        return names.index(self.release.stage) if self.release.stage in names else 0

    def _furthest(self, names: list[str]) -> int:
        if self.release.outcome == "promoted":
            return len(names) - 1
        reached = [
            place for place, name in enumerate(names) if _REACHED_BY.get(name) in self.newest
        ]
        return max(reached, default=0)

    def _note(self, stage: str, state: str, now: datetime) -> str:
        line = self.newest.get(_REACHED_BY.get(stage, ""))
        note = "" if state != "open" or self.release.status == "ended" else "not asked for"
        if stage == "data" and line and "training_examples" in line:
            note = count(line["training_examples"], "example")
        elif stage in ("training_gates", "smoke_test", "evaluation") and line:
            note = release_words.gates_note(line)
        elif stage == "canary" and self.story.reached:
            note = count(self.evidence.looks, "check")
        elif stage == "approval" and state == "now":
            note = f"{self.left(now)} left"
        elif stage == "approval" and "approval_answered" in self.newest:
            note = str(self.newest["approval_answered"]["decision"])
        elif stage == "approval" and state == "next":
            is_asked = self.story.plan.get("approval") == "required"
            note = "a person is asked" if is_asked else ""
        elif stage == "bake" and isinstance(self.story.plan.get("bake_looks"), int):
            # A release that has ended before its bake makes none of them.
            checks = count(self.story.plan["bake_looks"], "check")
            is_open = self.release.outcome is None
            note = checks if state == "proven" else f"{checks} planned" if is_open else ""
        return note

    def left(self, now: datetime) -> str:
        """How long a person can still answer."""
        question = self.release.question
        if question is None or question.until is None:
            return "no data"
        return duration(max(question.until - now, timedelta()))

    @property
    def looks(self) -> list[tuple[datetime | None, str, str]]:
        """The newest looks: when, the verdict, and why."""
        return [
            (
                one.at,
                release_words.VERDICTS.get(one.verdict, one.verdict),
                release_words.reason_in_words(one.reason),
            )
            for one in self.evidence.points[: -LOOKS_SHOWN - 1 : -1]
        ]

    def chart(self, gate: str) -> dict[str, Any] | None:
        """A gate's proof and harm by look, each over what decides; None for a gate that does not test."""
        points = [one for one in self.evidence.points if gate in one.gates]
        if not points:
            return None
        proof = [_cut(one.gates[gate][0]) for one in points]
        harm = [_cut(one.gates[gate][1]) for one in points]
        columns: tuple[list[int], list[float | None], list[float | None]] = ([], [], [])
        steps: list[int] = []
        # Where the numbers of each further rollout begin: they count from 1 again.
        starts: list[int] = []
        for at, (before, one) in enumerate(pairwise([points[0], *points])):
            if at and one.number <= before.number:
                starts.append(columns[0][-1] + 1)
                # Nothing is drawn from the end of a rollout to the next one.
                for column, value in zip(columns, (starts[-1], None, None), strict=True):
                    column.append(value)  # pyright: ignore[reportArgumentType]
            elif one.weight != before.weight:
                steps.append(one.number + (starts[-1] if starts else 0))
            columns[0].append(one.number + (starts[-1] if starts else 0))
            columns[1].append(proof[at])
            # Where nothing speaks for harm, nothing is drawn.
            is_harm = any(harm[max(0, at - 1) : at + 2])
            columns[2].append(-(harm[at] or 0.0) if is_harm else None)
        return {"kind": "evidence", "steps": steps, "starts": starts, "columns": columns}


def _cut(value: float | None) -> float | None:
    return None if value is None else min(MOST, max(0.0, value))


def _moment(one: ReleaseLine) -> datetime:
    """When it happened by the pipeline's clock; else when the service stored it."""
    at = one.line.get("at")
    return datetime.fromisoformat(at) if at else one.at


@page("/console/releases/{release_id}")
async def release(client: PageClient, release_id: ReleaseId) -> ReleaseView:
    """Everything that the release names is shown where it is still there."""
    found = await client.releases.get(release_id)
    return ReleaseView(
        found,
        *await _story_and_evidence(client, found),
        await _endpoint(client, found),
        await _known(client, get_deployment, found.baseline_deployment_id),
        await _known(client, get_deployment, found.candidate_deployment_id),
        await _known(client, get_job, found.job_id),
        await _known(client, get_evaluation, found.evaluation_id),
    )


async def _known(
    client: PageClient, operation: Operation[[str], R], identifier: str | None
) -> R | None:
    """A resource, unless it is gone or the session lacks the scope."""
    if identifier is None or not client.may(operation):
        return None
    try:
        return await client.call(operation, identifier)
    except ResourceNotFound:
        return None


async def _endpoint(client: PageClient, found: Release) -> EndpointView | None:
    """The endpoint with what callers see now, while the release goes on."""
    if found.endpoint_id is None or found.status == "ended" or not client.may(get_endpoint):
        return None
    try:
        return await endpoint_view(client, found.endpoint_id)
    except ResourceNotFound:
        return None


async def _story_and_evidence(
    client: PageClient, found: Release
) -> tuple[ReleaseStory, ReleaseEvidence]:
    """The story of the lines, and the evidence of the looks. An open page reads only the lines that are new."""
    # A part may put the release into the hipaa mode, which removes comments from lines that were read before.
    parts = (found.job_id, found.baseline_deployment_id, found.candidate_deployment_id)
    memory, place = client.visit.memory, (*parts, found.evaluation_id)
    story, evidence, records = memory.get(place, (ReleaseStory(), None, None))
    if evidence is None or records != found.records:
        await _read_on(client, found.id, story)
        evidence = await client.releases.evidence(found.id)
        memory[place] = story, evidence, found.records
    return story, evidence


async def _read_on(client: PageClient, release_id: str, story: ReleaseStory) -> None:
    while True:
        page = await client.releases.lines(
            release_id, limit=LINES_PAGE, after=story.after, looks=False
        )
        for one in page.lines:
            story.add(one)
        story.after = page.pagination.after
        if len(page.lines) < LINES_PAGE:
            return
