"""The service dies at any of its crash points, on either database, starts again, and every promise holds.

`support/crashes.py` defines the points and simulates the deaths, `support/invariants.py` checks the promises. A request
without an answer is sent once more with its `Idempotency-Key`, as its client would.
"""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.faults import invariants
from tests.support.faults.crash_lives import (
    BATCHED,
    EVALUATED,
    HISTORY,
    Order,
    opens,
    played_models,
    send,
)
from tests.support.faults.crashes import EVALUATION_POINTS, OBJECT_POINTS, POINTS
from tests.support.objects.object_invariants import check_objects
from tests.support.objects.object_server import ObjectServer
from tests.support.repeats import repeats, variants
from tests.support.service.evaluations import PlayedAnswers
from tests.support.service.in_process import Service
from tests.support.service.processes import ROOT
from tuneship.contract.evaluations import OPEN as OPEN_EVALUATION
from tuneship.contract.openai.batches import OPEN
from tuneship.contract.openai.ids import batch_file_of, own_id, shown_id
from tuneship.service import serve
from tuneship.store.database import rows, tables
from tuneship.store.database.rows import Row
from tuneship.store.records.batch_records import INPUT
from tuneship.training.checkpoints import Checkpoints

pytestmark = [pytest.mark.both_databases(postgres="soak"), pytest.mark.slow]
Crash = Callable[..., Order]
PASSES = (1, 2)
# The points at which a death leaves objects that no row names.
LEAVES_OBJECTS = {
    "object: after its PUT, before the row",
    "object: after the row, before the commit",
    "object: between the parts of a PUT",
    "object: after the commit, before it is deleted",
}


class Mailbox:
    """A receiver of webhooks that outlives the service processes."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        mailbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                mailbox.ids.append(self.headers["webhook-id"])
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever).start()


@pytest.fixture(scope="module")
def mailbox() -> Iterator[Mailbox]:
    made = Mailbox()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def program() -> Iterator["subprocess.Popen[str]"]:
    """Start, once, the program that forks a child for each service that dies."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.faults.crashes"]
    running = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield running
    running.communicate(timeout=120)
    assert running.returncode == 0


@pytest.fixture
def crash(
    tmp_path: Path,
    program: "subprocess.Popen[str]",
    mailbox: Mailbox,
    database_settings: Callable[[], dict[str, Any]],
) -> Crash:
    """Return a function that kills a service at the n-th pass of a point; `places` has more fields of the order."""

    def crashed(point: str, number: int, **places: Any) -> Order:
        folder = tmp_path / "data"
        folder.mkdir()
        url = database_settings().get("database_url", "")
        if POINTS[point].life is opens and url:
            _empty(url)
        order = Order(point, number, str(folder), url, mailbox.url, **places)
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write(json.dumps(asdict(order)) + "\n")
        program.stdin.flush()
        assert program.stdout.readline() == "killed\n"
        return order

    return crashed


def _empty(url: str) -> None:
    """Drop all tables, so that the service has to create them."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql("drop schema public cascade")
        connection.exec_driver_sql("create schema public")


@contextmanager
def restarted(
    order: Order, prepare: Callable[[Service], object] = lambda _: None
) -> Iterator[Service]:
    """Start the service again as `tuneship serve` does, after `prepare`; jobs train at once."""
    service = Service(Path(order.folder), **order.settings)
    service.engines.trains_at_once = True
    prepare(service)
    serve.recover(service.parts, None)
    with service:
        service.start_deliveries()
        yield service


def is_settled(service: Service) -> bool:
    """Return whether nothing is at work, no training files are left, and every event was sent."""
    if any((service.settings.data_dir / "work").iterdir()):
        return False  # the clean-up after a job is not done yet
    with service.database.read() as connection:
        busy = sa.select(sa.literal(1)).where(
            sa.exists().where(tables.jobs.c.status.in_(["queued", "running", "cancelling"]))
            | sa.exists().where(
                tables.deployments.c.status.in_(["creating", "updating", "deleting"])
            )
            | sa.exists().where(tables.batches.c.status.in_(OPEN))
            | sa.exists().where(tables.evaluations.c.status.in_(OPEN_EVALUATION))
            | sa.exists().where(tables.deliveries.c.status == "pending")
        )
        return connection.execute(busy).first() is None


@pytest.mark.parametrize("number", variants(PASSES))
@pytest.mark.parametrize(
    "point", [point for point in POINTS if point not in {*OBJECT_POINTS, *EVALUATION_POINTS}]
)
def test_a_service_that_died_goes_on_and_every_promise_holds(
    crash: Crash, mailbox: Mailbox, point: str, number: int
) -> None:
    order = crash(point, number)
    history = invariants.read_history(Path(order.folder) / HISTORY)
    _check_checkpoints(order, point)
    with restarted(order) as service:
        answers = answered(history) | repeated(service, history, point)
        service.until(lambda: is_settled(service))
        with service.database.read() as connection:
            nothing_lost_nothing_doubled(connection, answers)
            invariants.check_rows(connection)
            invariants.check_settled(connection, Path(order.folder))
            counts = Counter(row_id(one["id"]) for one in answers.values())
            invariants.check_audit(connection, service.parts.audit, counts)
            invariants.check_reported(connection, mailbox.ids)
            batches = invariants.rows_of(connection, tables.batches)
        for row in batches:
            each_request_is_answered_once(service, row)
        assert service.dataset()
    assert not [line for line in service.log.texts if line.startswith("ERROR")]


@pytest.mark.parametrize("run", repeats(1, 5))
@pytest.mark.parametrize("point", OBJECT_POINTS)
def test_after_a_death_rows_name_whole_objects_and_others_are_set_aside_after_a_day(
    crash: Crash, bucket: str, object_server: ObjectServer, point: str, run: int
) -> None:
    number = PASSES[run % 2]
    order = crash(point, number, bucket=bucket, environment=object_server.environment())
    history = invariants.read_history(Path(order.folder) / HISTORY)
    with restarted(order) as service:
        answers = answered(history) | repeated(service, history, point)
        with service.database.read() as connection:
            kept = {
                row["id"]
                for table in (tables.datasets, tables.models)
                for row in invariants.rows_of(connection, table)
            }
        deleted = {key.removeprefix("delete ") for key in answers if key.startswith("delete ")}
        assert {one["id"] for one in answers.values()} - deleted <= kept
        assert not kept & deleted
        assert check_objects(service) == (point in LEAVES_OBJECTS)
        assert service.dataset()


# What an evaluation has found.
FOUND = ("verdict", "reason", "stopped_early", "examples", "graders", "slices", "sentence")
EVALUATION_CASES = [
    pytest.param(
        *(point, number),
        marks=[pytest.mark.essential] if number == 3 and "inside" in point else [],
    )
    if number == numbers[0]
    else pytest.param(*(point, number), marks=pytest.mark.soak)
    for point in EVALUATION_POINTS
    for numbers in [(3, 1, 2, 4) if "a part" in point else PASSES]
    for number in numbers
]


@pytest.mark.parametrize(("point", "number"), EVALUATION_CASES)
def test_an_evaluation_whose_service_died_ends_like_one_that_nothing_disturbed(
    crash: Crash, mailbox: Mailbox, point: str, number: int
) -> None:
    order = crash(point, number)
    models: list[PlayedAnswers] = []
    with restarted(order, lambda service: models.append(played_models(service))) as service:
        (played,) = models
        service.until(lambda: is_settled(service))
        with service.database.read() as connection:
            invariants.check_audit(connection, service.parts.audit, {})
            invariants.check_reported(connection, mailbox.ids)
            recorded = invariants.events_by_resource(connection)
            left = invariants.rows_of(connection, tables.evaluations)
        played.dataset, played.candidate, played.baseline = (
            left[0][name] for name in ("dataset_id", "candidate", "baseline")
        )
        for one in left:
            assert [event["type"] for event in recorded[one["id"]]] == ["evaluation.completed"]
            stop_early = EVALUATED[one["name"]]
            undisturbed = played.ended(played.create(stop_early=stop_early, slice_by=["site"]))
            assert played.results(one["id"]) == played.results(undisturbed["id"])
            found = played.shown(one["id"])
            assert [found[name] for name in FOUND] == [undisturbed[name] for name in FOUND]
            assert found["stopped_early"] == stop_early
            tokens = [tokens_of(service, each) for each in (one["id"], undisturbed["id"])]
            assert tokens[0] == tokens[1]
    assert not [line for line in service.log.texts if line.startswith("ERROR")]


def tokens_of(service: Service, evaluation_id: str) -> tuple[int, int]:
    """The tokens of the answers that an evaluation has scored."""
    with service.database.read() as connection:
        row = rows.fetch(connection, tables.evaluations, evaluation_id, client_id=None)
    assert row is not None
    return row["prompt_tokens"], row["completion_tokens"]


def answered(history: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the acknowledged answers by the key of their request."""
    return {line["key"]: line for line in history if line["kind"] == "answered"}


def repeated(
    service: Service, history: list[dict[str, Any]], point: str
) -> dict[str, dict[str, Any]]:
    """Repeat the request that got no answer, as its client would, and return the answer by its key."""
    if not history or history[-1]["kind"] == "answered":
        return {}
    (method, path, key), body = history[-1]["request"], history[-1]["body"]
    answer = send(service, method, path, key, **({"json": body} if body else {}))
    if method == "DELETE" and answer.status_code == 404:  # the first one was committed
        return {key: {"id": path.rpartition("/")[2]}}
    assert answer.status_code < 300, answer.text
    was_committed = answer.headers.get("idempotent-replayed") == "true"
    if point.startswith(("accept", "upload", "audit")):
        assert was_committed == ("after commit" in point)
    return {key: answer.json()}


def nothing_lost_nothing_doubled(
    connection: sa.Connection, answers: dict[str, dict[str, Any]]
) -> None:
    """Check that exactly the acknowledged resources exist, and that each split is the last acknowledged one."""
    answered_ids = {row_id(one["id"]) for one in answers.values()}
    made: set[str] = set()
    for table in (
        tables.datasets,
        tables.jobs,
        tables.deployments,
        tables.endpoints,
        tables.batches,
    ):
        made |= {row["id"] for row in invariants.rows_of(connection, table)}
    files = invariants.rows_of(connection, tables.batch_files)
    made |= {row["id"] for row in files if row["purpose"] == INPUT}
    assert made >= answered_ids
    assert len(made - answered_ids) <= 1  # the dataset that every service process starts with
    for row in invariants.rows_of(connection, tables.endpoints):
        last = [one for one in answers.values() if one["id"] == row["id"]][-1]
        assert (row["members"], row["version"]) == (last["deployments"], last["version"])
    deleted = {key.removeprefix("delete ") for key in answers if key.startswith("delete ")}
    for row in invariants.rows_of(connection, tables.deployments):
        assert (row["status"] == "deleted") == (row["id"] in deleted)


def row_id(shown: str) -> str:
    """The id of a row; files of batches are shown with another beginning."""
    return batch_file_of(own_id(shown)) if shown.startswith("file-") else shown


def each_request_is_answered_once(service: Service, batch: Row) -> None:
    """Check that a batch has completed, with its answers in the order of its requests."""
    numbers = [batch[name] for name in ("total", "completed", "failed")]
    assert (batch["status"], numbers) == ("completed", [len(BATCHED), len(BATCHED), 0])
    path = f"/openai/v1/files/{shown_id(batch['output_file_id'])}/content"
    answer = service.call("GET", path)
    assert answer.status_code == 200, answer.text
    names = [json.loads(line)["custom_id"] for line in answer.text.splitlines()]
    assert names == BATCHED


def _check_checkpoints(order: Order, point: str) -> None:
    """Check that only whole checkpoints count, and that the newest is one that was finished."""
    for folder in (Path(order.folder) / "work").glob("*/checkpoints"):
        names = {one.name for one in folder.glob("step-*")}
        if point == "train: mid-checkpoint tmp":
            assert list(folder.glob(".tmp-*"))
        newest = Checkpoints(folder, folder.parent.name).latest()
        assert not list(folder.glob(".tmp-*"))
        assert (f"step-{newest.step:09}" in names) if newest else not names
        if newest is not None:
            assert set(newest.tensors["weights"].tolist()) == {float(newest.step)}
