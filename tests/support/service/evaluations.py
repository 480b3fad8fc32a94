"""Evaluations of a service in this process, whose models are played: they answer as a test says."""

import re
from collections.abc import Collection, Sequence
from copy import copy
from typing import Any, Self

from tests.support.service.in_process import CATALOGUE, Service, jsonl

TOKENIZER: Any = CATALOGUE.default.tokenizer
ENDS = ("completed", "failed", "cancelled")
GRADERS = [{"name": "chapter", "type": "string_check"}]
SITES = ("A", "B")
# Stands in every prompt, reference and answer, and must be found nowhere but in the dataset.
PLANTED = "zq planted text"


def rows(count: int) -> list[dict[str, Any]]:
    """Examples of two sites; the right answer follows from the number of the case."""
    return [
        {
            "instruction": f"{PLANTED}: case {number}?",
            "response": right(number),
            "metadata": {"site": SITES[number % 2], "patient": number // 2, "note": PLANTED},
        }
        for number in range(count)
    ]


def evaluated(service: Service, dataset_id: str, deployment_id: str) -> str:
    """Evaluate a deployment alone, and return the id when that has ended."""
    made = _begun(service, dataset_id, deployment_id)
    path = f"/v1/evaluations/{made}"
    service.until(lambda: service.call("GET", path).json()["status"] in ENDS)
    return made


def cancelled(service: Service, dataset_id: str, deployment_id: str) -> str:
    """Cancel an evaluation whose answers do not come, and return its id."""
    service.engines.may_answer.clear()
    made = _begun(service, dataset_id, deployment_id)
    answer = service.call("POST", f"/v1/evaluations/{made}/cancel")
    service.engines.may_answer.set()
    assert answer.status_code == 200, answer.text
    return made


def _begun(service: Service, dataset_id: str, deployment_id: str) -> str:
    body = {"name": "alone", "dataset_id": dataset_id, "candidate": deployment_id}
    return service.call("POST", "/v1/evaluations", json=body | {"graders": GRADERS}).json()["id"]


def right(number: int) -> str:
    return f"{PLANTED}, chapter {number % 4}"


class PlayedAnswers:
    """Deployments whose models answer rightly but for some cases; the tuned model has an adapter."""

    dataset: str
    baseline: str
    candidate: str

    def __init__(self, service: Service) -> None:
        """Play the models of a service, which need not run yet."""
        self.service = service
        # Cases in which the tuned and the base model are wrong.
        self.tuned_fails: Collection[int] = ()
        self.base_fails: Collection[int] = ()
        # Case numbers in the order in which they were asked, for each of the models.
        self.asked: list[tuple[bool, int]] = []
        service.engines.answer_to = self._answer_to  # pyright: ignore[reportAttributeAccessIssue]

    def set_up(self, **deployed: Any) -> Self:
        """Upload the examples and deploy both models; `deployed`: more fields of the deployments."""
        self.dataset = self.service.dataset(content=jsonl(*rows(400)))
        model = self.service.model()
        self.baseline = self.service.deployment("base", **deployed)
        self.candidate = self.service.deployment("tuned", model_name=model, **deployed)
        return self

    def moved_to(self, service: Service) -> "PlayedAnswers":
        """Let the models of another service on the same data answer alike; nothing was asked there yet."""
        moved = copy(self)
        moved.service, moved.asked = service, []
        service.engines.answer_to = moved._answer_to  # pyright: ignore[reportAttributeAccessIssue]
        return moved

    def _answer_to(self, frame: dict[str, Any]) -> Sequence[int]:
        is_tuned = frame.get("adapter") is not None
        found = re.search(r"case (\d+)", TOKENIZER.decode(frame["tokens"]))
        number = int(found[1]) if found else -1
        self.asked.append((is_tuned, number))
        is_wrong = number in (self.tuned_fails if is_tuned else self.base_fails)
        text = f"{PLANTED}, no idea" if is_wrong else right(number)
        return TOKENIZER.encode(text, add_special_tokens=False).ids

    def body(self, **fields: Any) -> dict[str, Any]:
        made = {
            "name": "chapters",
            "dataset_id": self.dataset,
            "candidate": self.candidate,
            "baseline": self.baseline,
            "graders": GRADERS,
        }
        return made | fields

    def create(self, **fields: Any) -> str:
        answer = self.service.call("POST", "/v1/evaluations", json=self.body(**fields))
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    def shown(self, evaluation_id: str) -> dict[str, Any]:
        answer = self.service.call("GET", f"/v1/evaluations/{evaluation_id}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ended(self, evaluation_id: str) -> dict[str, Any]:
        self.service.until(lambda: self.shown(evaluation_id)["status"] in ENDS)
        return self.shown(evaluation_id)

    def results(self, evaluation_id: str, **query: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            path = f"/v1/evaluations/{evaluation_id}/results"
            params = {"limit": 100, "offset": len(found), **query}
            answer = self.service.call("GET", path, params=params).json()
            found += answer["results"]
            if answer["pagination"]["next_offset"] is None:
                return found
