"""A fake of the service's releases for the pipeline, as their contract says: it keeps whole lines and folds no more
than the open question. It can lose answers, fail, refuse, or forget what it had.
"""

from collections.abc import Mapping
from typing import Any

from tests.support.fakes.canary_service import Answer, FakeService, LostAnswer, Refusal, as_text
from tests.support.fakes.whole_service import WholeService

KEPT: dict[str, Any] = dict.fromkeys(
    (
        "job_id",
        "baseline_deployment_id",
        "candidate_deployment_id",
        "evaluation_id",
        "candidate_percentage",
        "outcome",
        "reason",
        "ended_at",
    )
)


class ReleaseService(FakeService):
    """The fake service for rollouts, with releases."""

    def __init__(self, **options: Any) -> None:
        """Begin without releases."""
        super().__init__(**options)
        # By id: the release as it was announced, its lines by record, and its question.
        self.releases: dict[str, dict[str, Any]] = {}
        self.lines: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self.questions: dict[str, dict[str, Any] | None] = {}
        # One action for each request that brings lines: "lose" its answer, "fail", or "ok".
        self.line_script: list[str] = []
        self.refusal: Refusal | None = None
        self.release_calls: list[str] = []
        # The number of lines of each request that brought some.
        self.sizes: list[int] = []

    def other(self, method: str, parts: list[str], query: dict[str, str], body: Any) -> Answer:
        """Answer what is asked of releases."""
        if parts[0] != "releases":
            return super().other(method, parts, query, body)
        self.release_calls.append(f"{method} {'/'.join(parts[2:])}".strip())
        if self.refusal is not None:
            raise self.refusal
        match method, parts[1:]:
            case "POST", []:
                return 201, self._created(body)
            case "GET", []:
                page = {
                    "total": len(self.releases),
                    "limit": 100,
                    "offset": 0,
                    "next_offset": None,
                }
                return 200, {
                    "releases": [self._shown(one) for one in self.releases],
                    "pagination": page,
                }
            case "GET", [release_id] if release_id in self.releases:
                return 200, self._shown(release_id)
            case "POST", [release_id, "lines"] if release_id in self.releases:
                return self._stored(release_id, body)
            case _:
                raise Refusal(404, "resource_not_found")

    def _created(self, body: Mapping[str, Any]) -> dict[str, Any]:
        known = [key for key, one in self.releases.items() if one["run_key"] == body["run_key"]]
        release_id = known[0] if known else f"rel_{len(self.releases):010d}"
        if not known:
            self.releases[release_id], self.lines[release_id] = dict(body), {}
            self.questions[release_id] = None
        return self._shown(release_id)

    def _shown(self, release_id: str) -> dict[str, Any]:
        announced, question = self.releases[release_id], self.questions[release_id]
        names = ("model_name", "endpoint_name", "endpoint_id")
        return {
            **KEPT,
            **{name: announced.get(name) for name in names},
            "id": release_id,
            "run_key": announced["run_key"],
            "kind": announced["kind"],
            "status": "waiting" if question else "running",
            "stage": "data",
            "links": announced.get("links", {}),
            "created_at": as_text(self.now),
            "updated_at": as_text(self.now),
            "question": question,
            "records": {name: len(one) + 1 for name, one in self.lines[release_id].items()},
        }

    def _stored(self, release_id: str, body: Mapping[str, Any]) -> Answer:
        action = self.line_script.pop(0) if self.line_script else "ok"
        if action == "fail":
            raise Refusal(503, "internal_error")
        self.sizes.append(len(body["lines"]))
        kept = self.lines[release_id].setdefault(body["record"], [])
        if body["first_line"] > len(kept) + 1:
            raise Refusal(409, "invalid_request_error", "a gap")
        for line in body["lines"][len(kept) + 1 - body["first_line"] :]:
            kept.append(line)
            self._fold(release_id, line)
        if action == "lose":
            raise LostAnswer
        return 200, {"next_line": len(kept) + 1, "answer": None}

    def _fold(self, release_id: str, line: Mapping[str, Any]) -> None:
        if line["kind"] in ("question", "approval_asked"):
            self.questions[release_id] = {
                "id": line["question"],
                "asks": line.get("asks", ["promotion"]),
                "until": line["until"],
                "allowed": ["promote", "roll back"],
                "needs_reason": False,
                "answer": None,
            }
        elif line["kind"] in ("held_gates", "approval_answered", "ended"):
            self.questions[release_id] = None

    def say(self, decision: str, at: str = "2026-01-05T08:00:00Z", **said: Any) -> bool:
        """Answer the open question of the only release as a person would; False while none is open."""
        question = next((one for one in self.questions.values() if one), None)
        if question is None:
            return False
        question["answer"] = {
            "question": question["id"],
            "decision": decision,
            "name": "Eve",
            "reason": None,
            "ticket": None,
            "at": at,
            **said,
        }
        return True


class WholeReleaseService(ReleaseService, WholeService):
    """The fake service for whole releases, with their records."""
