"""Pipelines that are played: the lines of their records, sent to a service as a real one sends them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

from tests.support.service.in_process import Service
from tuneship.gates.gate_types import GateReading
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    ApprovalAnswered,
    ApprovalAsked,
    Begun,
    Ended,
    Fact,
    Look,
    Phase,
    Probed,
    SplitConfirmed,
    SplitIntended,
    Verdict,
    to_line,
)
from tuneship.gates.statistics.evidence import LOG_PROVEN

Line = dict[str, Any]
OWN = "3f9a1c2b4d5e6f70-1-9f2c41d7"
ROLLOUT = "rollout-5d6e7f80-1-0a1b2c3d"
QUESTION = "7c1e5b0a-4a7b-4bb0-9b8a-2d3f5a6b7c8d"
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
LOG_HARM = math.log(80)
GATES = ("error", "slow", "very_slow", "typical")


def line_of(fact: Fact) -> Line:
    """A line of a rollout's record, as its file has it."""
    return {**json.loads(to_line(fact)), "link": "0" * 64}


class PlayedPipeline:
    """One release, as a pipeline announces it and tells of it."""

    def __init__(self, service: Service, run_key: str, client: str = "alice", **body: Any) -> None:
        """Announce the release."""
        self.service, self.client = service, client
        asked = {"run_key": run_key, "kind": "release", "endpoint_name": "notes"} | body
        answer = service.call("POST", "/v1/releases", client, json=asked)
        assert answer.status_code == 201, answer.text
        self.id: str = answer.json()["id"]
        self.next = {OWN: 1, ROLLOUT: 1}

    @property
    def path(self) -> str:
        return f"/v1/releases/{self.id}"

    @property
    def shown(self) -> Line:
        answer = self.service.call("GET", self.path, self.client)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, record: str, first: int, lines: Sequence[Line]) -> httpx.Response:
        sent = {"record": record, "first_line": first, "lines": [*lines]}
        return self.service.call("POST", f"{self.path}/lines", self.client, json=sent)

    def tell(self, record: str, *lines: Line) -> Line:
        """Send the next lines of a record; returns what the service answers."""
        answer = None
        for start in range(0, len(lines), 100):
            answer = self.post(record, self.next[record], lines[start : start + 100])
            assert answer.status_code == 200, answer.text
            self.next[record] = answer.json()["next_line"]
        assert answer is not None
        return answer.json()

    def own(self, kind: str, **fields: Any) -> Line:
        """Send a line of the release's own record."""
        return self.tell(OWN, {"kind": kind, "at": datetime.now(UTC).isoformat(), **fields})

    def facts(self, *facts: Fact) -> Line:
        """Send lines of the rollout's record."""
        return self.tell(ROLLOUT, *map(line_of, facts))

    def answer(self, decision: str, client: str = "alice", **more: Any) -> httpx.Response:
        body = {"question": QUESTION, "decision": decision, "name": "A. Reviewer"} | more
        return self.service.call("POST", f"{self.path}/answer", client, json=body)

    def lines(self, **query: Any) -> list[Line]:
        path = f"{self.path}/lines"
        answer = self.service.call("GET", path, self.client, params={"limit": 1000, **query})
        assert answer.status_code == 200, answer.text
        return [one["line"] for one in answer.json()["lines"]]


def begun(baseline: str, candidate: str, endpoint: str = "cep_" + "0" * 24) -> Begun:
    """The first line of a rollout."""
    plan = CanaryPlan(
        baseline_deployment_id=baseline,
        candidate_deployment_id=candidate,
        endpoint_id=endpoint,
        approval="required",
    )
    dumped = plan.model_dump(mode="json")
    return Begun("rollout_1", endpoint, dumped, plan.digest(), (), endpoint_name="notes")


def look(number: int, of: int, weight: int, *, is_proven: bool = False, **more: Any) -> Look:
    """A look of a healthy rollout: proof grows with the number of looks, and harm falls."""
    part = number / of
    gates = tuple(
        GateReading(
            name=name,
            state="proven" if is_proven or part * (1.3 - 0.15 * place) >= 1 else "open",
            candidate_requests=weight * number,
            candidate_bad=number // (3 + place),
            baseline_requests=(100 - weight) * number,
            baseline_bad=number // 4,
            candidate_share=1 / (weight * (3 + place)),
            baseline_share=1 / ((100 - weight) * 4) if weight < 100 else None,
            harm_limit=0.02,
            ok_limit=0.01,
            log_e_ok=LOG_PROVEN * part * (1.3 - 0.15 * place),
            log_e_ok_limit=LOG_PROVEN,
            log_e_harm=LOG_HARM * (0.15 * math.sin(number / 3) - 0.3 * part),
            log_e_harm_limit=LOG_HARM,
            requests_to_proof=None if is_proven or part * (1.3 - 0.15 * place) >= 1 else 420,
        )
        for place, name in enumerate(GATES)
    )
    moment = NOON + timedelta(minutes=number)
    made = Look(
        number=number,
        phase=Phase.COMPARE,
        weight=weight,
        verdict=Verdict.HOLD,
        at=moment,
        horizon=moment,
        missing=None,
        standing=False,
        step_buckets=number,
        brought_data=True,
        newest_baseline=moment,
        newest_candidate=moment,
        limits=None,
        baseline_status="running",
        candidate_status="running",
        candidate_replicas=1,
        reason="not_proven:very_slow",
        gates=gates,
        kept="cGFja2Vk",
    )
    return replace(made, **more)


def up_to_the_canary(pipeline: PlayedPipeline, **ids: str) -> None:
    """Send the stages before any traffic moves."""
    known = {"job": "ft", "baseline": "dep", "candidate": "dep", "evaluation": "evl"}
    given = {name: f"{kind}_{'0' * 24}" for name, kind in known.items()} | ids
    gates = [{"name": "holdout_loss", "state": "pass", "value": 1.157, "limit": 1.31, "note": "x"}]
    pipeline.own("begun", run_key="x", endpoint_id=None, endpoint_name="notes")
    pipeline.own("data", dataset_id="ds_" + "0" * 24, training_examples=960)
    pipeline.own("job", id=given["job"], content=["a"], settings="")
    pipeline.own("trained", id=given["job"])
    pipeline.own("training_gates", decision="pass", gates=gates)
    pipeline.own("baseline", id=given["baseline"])
    pipeline.own("candidate", id=given["candidate"])
    pipeline.own("smoke_test", gates=[{"name": "smoke_test", "state": "pass"}])
    pipeline.own("evaluation", id=given["evaluation"], verdict="pass", gates=[])
    pipeline.own("rollout", plan={"traffic": {"prompts": "/data/prompts.jsonl"}})


def shifting(
    pipeline: PlayedPipeline, baseline: str, candidate: str, endpoint: str = "cep_" + "0" * 24
) -> None:
    """Send forty looks of a rollout that has reached 75 %."""
    steps = {1: 5, 10: 25, 20: 50, 30: 75}
    facts: list[Fact] = [begun(baseline, candidate, endpoint)]
    weight = 0
    for number in range(1, 41):
        if number in steps:
            weight = steps[number]
            facts.append(SplitIntended(weight, "advance"))
            facts.append(SplitConfirmed(weight, NOON + timedelta(minutes=number)))
        facts += [Probed(weight, 100 - weight), look(number, 42, weight)]
    pipeline.facts(*facts)


def asked(service: Service, run_key: str, client: str = "alice", **ids: str) -> PlayedPipeline:
    """A release that waits for a person at 75 %."""
    pipeline = PlayedPipeline(service, run_key, client, model_name="notes-v14")
    given = {"baseline": "dep_" + "1" * 24, "candidate": "dep_" + "2" * 24} | ids
    endpoint = given.pop("endpoint", "cep_" + "0" * 24)
    up_to_the_canary(pipeline, **given)
    shifting(pipeline, given["baseline"], given["candidate"], endpoint)
    until = datetime.now(UTC) + timedelta(hours=23)
    pipeline.facts(
        look(41, 35, 75, is_proven=True, verdict=Verdict.ASK, reason="approval"),
        ApprovalAsked(NOON, QUESTION, until),
    )
    return pipeline


def ended(service: Service, run_key: str, client: str = "alice") -> PlayedPipeline:
    """A release that a person has promoted."""
    pipeline = asked(service, run_key, client)
    pipeline.facts(
        ApprovalAnswered("promote", "A. Reviewer", "looks good"),
        SplitConfirmed(100, NOON),
        Ended("promoted", "none"),
    )
    pipeline.own("ended", outcome="promoted", reason="none")
    pipeline.own("model_card", sha256="0" * 64)
    return pipeline
