"""Real services are killed and stopped in the middle of an evaluation: its scores equal those of one left alone."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.cluster_members import Members
from tests.support.databases.postgres_cluster import Cluster
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
from tuneship.client import Client

pytestmark = pytest.mark.slow

Place = tuple[str, Mapping[str, str]]

# Parts have 32 to 128 examples.
EXAMPLES = 320
OVERLAP = {"type": "text_similarity", "evaluation_metric": "fuzzy_match"}
# Neither model has learnt the references, and some answers resemble them by chance.
GRADERS = [{"name": "alike", "pass_threshold": 0.3, **OVERLAP}, {"name": "overlap", **OVERLAP}]
FOUND = ("verdict", "reason", "stopped_early", "examples", "graders", "slices", "sentence")


class Evaluations:
    """Evaluations of one or two models of a real service, which ends and starts again."""

    def __init__(
        self, place: Callable[[], Place], client: Client, folder: Path, *, is_compared: bool = True
    ) -> None:
        """`place`: where to ask now, as the address and the headers."""
        self.place = place
        base = running_deployment(client, "base", "tuneship-tiny")
        models: dict[str, Any] = {"candidate": base}
        if is_compared:
            job = start_job(client, rows_file(folder / "rows.jsonl", 64))
            model = str(ended_job(client, job).fine_tuned_model)
            models = {"candidate": running_deployment(client, "tuned", model), "baseline": base}
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
            **models,
            "graders": GRADERS,
            "slice_by": ["site"],
            "max_tokens": 12,
            "stop_early": False,
        }

    def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        address, headers = self.place()
        answer = httpx.request(method, f"{address}{path}", headers=headers, timeout=60, **options)
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

    def disturbed(self, ends: Iterable[Callable[[], object]]) -> str:
        """Have an evaluation answered while these are called, each after further parts."""
        made, before = self.create(), 0
        for end in ends:
            until(lambda before=before: self.stored(made) > before or self.has_ended(made))
            if self.has_ended(made):
                break
            before = self.stored(made)
            end()
            assert self.stored(made) >= before
        return made

    def compare(self, ends: Iterable[Callable[[], object]]) -> dict[str, Any]:
        """Have the same evaluation answered undisturbed and disturbed; returns what both have found."""
        undisturbed = self.ended(self.create())
        found = self.ended(self.disturbed(ends))
        assert undisturbed["examples"]["scored"] == EXAMPLES
        assert [found[name] for name in FOUND] == [undisturbed[name] for name in FOUND]
        scores = [self.results(one["id"]) for one in (found, undisturbed)]
        assert scores[0] == scores[1]
        assert len({one["line"] for one in scores[0]}) == len(scores[0]) == EXAMPLES
        return found


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

    def end_and_start(end: Callable[[Serve], None]) -> None:
        end(serve)
        serve.start()

    try:
        place = lambda: (serve.url, serve.headers)  # noqa: E731
        evaluations = Evaluations(place, serve.client(), tmp_path)
        found = evaluations.compare(partial(end_and_start, one) for one in ends)
    finally:
        serve.kill()
    assert found["graders"][0]["losses"] > 0


@pytest.mark.postgres
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(1, id="once"),
        # As long as there is a further part, with two models.
        pytest.param(EXAMPLES, id="every", marks=pytest.mark.soak),
    ],
)
def test_scores_after_the_kill_of_a_clusters_leader_are_those_of_an_undisturbed_evaluation(
    tmp_path: Path, postgres: Cluster, bucket: str, changes: int
) -> None:
    database = postgres.new_database()
    members = Members(tmp_path, database, bucket, postgres, generate_requests_per_minute="0")

    def kill_the_leader() -> None:
        leader = members.leader
        leader.kill()
        until(lambda: members.leader is not leader)
        # Else the other one answers to the end.
        if changes > 1:
            leader.start()

    with closing(members):
        members.start(names=("a", "b"))
        headers = members.serves[0].headers
        place = lambda: (members.live()[0].settings.url, headers)  # noqa: E731
        is_compared = changes > 1
        evaluations = Evaluations(place, members.clients[1], tmp_path, is_compared=is_compared)
        evaluations.compare([kill_the_leader] * changes)
        ended = members.run("select count(*) from events where type = 'evaluation.completed'")
        assert ended == [(2,)]
