"""A real service is killed and stopped in the middle of an evaluation: its scores equal those of one left alone."""

from collections.abc import Callable, Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.evaluations import ENDS
from tests.support.service.in_process import jsonl
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# Parts have 32 to 128 examples.
EXAMPLES = 320
OVERLAP = {"type": "text_similarity", "evaluation_metric": "fuzzy_match"}
# Neither model has learnt the references, and some answers resemble them by chance.
GRADERS = [{"name": "alike", "pass_threshold": 0.3, **OVERLAP}, {"name": "overlap", **OVERLAP}]
FOUND = ("verdict", "reason", "stopped_early", "examples", "graders", "slices", "sentence")


class Evaluations:
    """Evaluations of two models of a real service, which ends and starts again."""

    def __init__(self, serve: Serve, folder: Path) -> None:
        self.serve = serve
        client = serve.client()
        job = start_job(client, rows_file(folder / "rows.jsonl", 64))
        model = str(ended_job(client, job).fine_tuned_model)
        lines = [
            {
                "instruction": f"Which chapter is case {number}?",
                "response": f"chapter {number % 20}",
                "metadata": {"site": "AB"[number % 2]},
            }
            for number in range(EXAMPLES)
        ]
        data = {"name": "held out", "format": "instruction"}
        sent = {"file": ("held-out.jsonl", jsonl(*lines), "application/jsonl")}
        self.body = {
            "name": "letters",
            "dataset_id": self.ask("POST", "/v1/datasets", data=data, files=sent)["id"],
            "candidate": running_deployment(client, "tuned", model),
            "baseline": running_deployment(client, "base", "tuneship-tiny"),
            "graders": GRADERS,
            "slice_by": ["site"],
            "max_tokens": 12,
            "stop_early": False,
        }

    def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        serve = self.serve
        answer = httpx.request(
            method, f"{serve.url}{path}", headers=serve.headers, timeout=60, **options
        )
        assert answer.status_code < 300, answer.text
        return answer.json()

    def create(self) -> str:
        return self.ask("POST", "/v1/evaluations", json=self.body)["id"]

    def shown(self, evaluation_id: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/evaluations/{evaluation_id}")

    def has_ended(self, evaluation_id: str) -> bool:
        return self.shown(evaluation_id)["status"] in ENDS

    def ended(self, evaluation_id: str) -> dict[str, Any]:
        until(lambda: self.has_ended(evaluation_id))
        return self.shown(evaluation_id)

    def results(self, evaluation_id: str) -> list[dict[str, Any]]:
        path = f"/v1/evaluations/{evaluation_id}/results?limit=1000"
        return self.ask("GET", path)["results"]

    def stored(self, evaluation_id: str) -> int:
        """The number of examples whose scores are stored."""
        return self.shown(evaluation_id)["examples"]["scored"]

    def disturbed(self, ends: Iterable[Callable[[Serve], None]]) -> str:
        """Have an evaluation answered by a service that ends in these ways, each time after further parts."""
        made, before = self.create(), 0
        for end in ends:
            until(lambda before=before: self.stored(made) > before or self.has_ended(made))
            if self.has_ended(made):
                break
            before = self.stored(made)
            end(self.serve)
            self.serve.start()
            assert self.stored(made) >= before
        return made


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param([Serve.kill, Serve.kill, Serve.stop], id="some"),
        # As long as there is a further part.
        pytest.param(cycle([Serve.kill, Serve.stop]), id="every", marks=pytest.mark.soak),
    ],
)
def test_scores_after_kills_and_stops_are_those_of_an_undisturbed_evaluation(
    tmp_path: Path, ends: Iterable[Callable[[Serve], None]]
) -> None:
    serve = Serve(tmp_path / "data", generate_requests_per_minute="0")
    try:
        evaluations = Evaluations(serve, tmp_path)
        undisturbed = evaluations.ended(evaluations.create())
        found = evaluations.ended(evaluations.disturbed(ends))
        scores = [evaluations.results(one["id"]) for one in (found, undisturbed)]
    finally:
        serve.kill()
    assert undisturbed["examples"]["scored"] == EXAMPLES
    assert undisturbed["graders"][0]["losses"] > 0
    assert [found[name] for name in FOUND] == [undisturbed[name] for name in FOUND]
    assert scores[0] == scores[1]
