"""Data of every kind that 26.12.0 has left, killed in the middle of a training, goes on with this version."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.config import Config

from tests.support.databases.data_of_26_12_0 import PROMPT, SCORED, unpacked
from tests.support.databases.other_versions import first_release
from tests.support.service.processes import ROOT, Serve
from tests.support.waiting import until
from tuneship.contract.releases import RECORD
from tuneship.store.database.database import MIGRATIONS, SQLITE_FILE, Database, sqlite_url
from tuneship.store.installation.backup_format import OF_THE_MOMENT

pytestmark = pytest.mark.slow
DATABASES = [
    pytest.param("sqlite", marks=pytest.mark.essential),
    pytest.param("postgres", marks=pytest.mark.postgres),
]

NEW_TABLES = {"releases", "release_lines"}
# A row of the first is made by an agent, of the second by a member, and of the last by PostgreSQL alone.
NOT_OF_ONE_SERVICE = {"leaders", "unlinked_audit", "job_row_losses"}
Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=DATABASES)
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> "Old":
    settings: dict[str, str] = {}
    if request.param == "postgres":
        settings["database_url"] = request.getfixturevalue("postgres").blank_database()
    return Old(tmp_path_factory.mktemp("old"), settings)


class Old:
    """The data directory that 26.12.0 has left, with its database, to which this version opens the way."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.facts = unpacked(folder)
        self.data_dir, self.settings = folder / "data", settings
        file = sqlite_url(self.data_dir / SQLITE_FILE)
        self.url = str(settings.get("database_url", file))
        if self.url != file:
            copied(file, self.url)
        engine = sa.create_engine(self.url)
        # A job may take a month at most, and this one has waited in the repository.
        with engine.begin() as connection:
            moved = sa.text("update jobs set started_at = :now where status = 'running'")
            connection.execute(moved, {"now": datetime.now(UTC)})
        engine.dispose()

    @property
    def environment(self) -> dict[str, str]:
        own = {f"TUNESHIP_{name.upper()}": value for name, value in self.settings.items()}
        return os.environ | own

    def rows(self) -> Rows:
        engine = sa.create_engine(self.url)
        with engine.connect() as connection:
            found = rows_of(connection)
        engine.dispose()
        return found

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "tuneship.cli.main", *arguments]
        place = ("--data-dir", str(self.data_dir))
        return subprocess.run(
            [*command, *place],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )


def reflected(connection: sa.Connection) -> list[sa.Table]:
    metadata = sa.MetaData()
    metadata.reflect(connection)
    return [table for table in metadata.sorted_tables if table.name != "alembic_version"]


def rows_of(connection: sa.Connection) -> Rows:
    return {
        table.name: [dict(row) for row in connection.execute(sa.select(table)).mappings()]
        for table in reflected(connection)
    }


def copied(file: str, url: str) -> None:
    """Make the tables of 26.12.0 in a Postgres database, and put the rows of an SQLite file there."""
    source, target = sa.create_engine(file), sa.create_engine(url)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    with source.connect() as old, target.begin() as new:
        config.attributes["connection"] = new
        command.upgrade(config, "0001")
        new.execute(sa.text("update alembic_version set works_with = '0001'"))
        rows = rows_of(old)
        for table in reflected(new):
            new.execute(sa.delete(table))
            if rows[table.name]:
                new.execute(sa.insert(table), [in_utc(row) for row in rows[table.name]])
            for column in table.primary_key:
                name = sa.func.pg_get_serial_sequence(table.name, column.name)
                if sequence := new.scalar(sa.select(name)):
                    newest = sa.select(sa.func.setval(sequence, sa.func.max(column)))
                    new.execute(newest.select_from(table))
    source.dispose()
    target.dispose()


def in_utc(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.replace(tzinfo=UTC) if isinstance(value, datetime) else value
        for name, value in row.items()
    }


@pytest.fixture(scope="module")
def before(old: Old) -> Rows:
    """The rows that 26.12.0 has left, which this version then finds in its own tables."""
    before = old.rows()
    Database(old.url).close()
    return before


@pytest.fixture(scope="module")
def serve(old: Old, before: Rows) -> Iterator[Serve]:
    assert before
    serve = Serve(old.data_dir, **old.settings)
    yield serve
    serve.stop()


@pytest.fixture(scope="module")
def http(old: Old, serve: Serve) -> Iterator[httpx.Client]:
    """Requests with a key that 26.12.0 has issued."""
    headers = {"Authorization": f"Bearer {old.facts['key']}", "X-Client-ID": "local"}
    with httpx.Client(base_url=serve.url, headers=headers, timeout=300, trust_env=False) as http:
        yield http


def test_the_data_has_every_kind(before: Rows) -> None:
    passing = {table.name for table in OF_THE_MOMENT} | NOT_OF_ONE_SERVICE
    assert {name for name, rows in before.items() if not rows} <= passing


def test_every_row_is_kept(old: Old, before: Rows) -> None:
    after = old.rows()
    assert {*after} == {*before} | NEW_TABLES
    for name, rows in before.items():
        more = {"person": None} if name in ("api_keys", "audit", "unlinked_audit") else {}
        if name == "endpoints":
            more = {"pausable": False, "paused": None, "reverted": None}
        assert after[name] == [row | more for row in rows]


def test_nothing_of_it_is_missing_or_damaged(old: Old, before: Rows) -> None:
    assert before
    done = old.run("check")
    assert done.returncode == 0, done.stdout + done.stderr
    done = old.run("audit", "verify")
    assert done.returncode == 0, done.stdout + done.stderr
    done = old.run("audit", "export", "--format", "csv")
    assert len(list(csv.reader(StringIO(done.stdout)))) == len(before["audit"]) + 1


def call(http: httpx.Client, method: str, path: str, **options: Any) -> Any:
    answer = http.request(method, path, **options)
    assert answer.is_success, (path, answer.text)
    return answer.json()


def test_keys_open_what_they_opened(old: Old, http: httpx.Client) -> None:
    revoked = {"Authorization": f"Bearer {old.facts['revoked_key']}", "X-Client-ID": "radiology"}
    assert http.get("/v1/datasets", headers=revoked).status_code == 401
    datasets = call(http, "GET", "/v1/datasets", params={"limit": 100})["datasets"]
    assert {old.facts["dataset"], old.facts["merged_dataset"]} <= {one["id"] for one in datasets}
    hooks = call(http, "GET", "/v1/webhooks")["webhooks"]
    assert {one["id"] for one in hooks} == {*old.facts["webhooks"]}


def test_deployments_answer_as_before(old: Old, http: httpx.Client) -> None:
    for name in ("baseline", "candidate"):
        path = f"/v1/deployments/{old.facts[name]}"
        until(lambda path=path: call(http, "GET", path)["status"] == "running")
        assert call(http, "POST", f"{path}/generate", json=PROMPT)["completion"]
    body = {"model": old.facts["model"], **SCORED}
    scored = call(http, "POST", "/openai/v1/completions", json=body)
    found = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert found[1:] == pytest.approx(old.facts["log_probabilities"][1:], rel=1e-3)


def test_a_lease_that_has_run_out_since_gives_the_traffic_back(
    old: Old, http: httpx.Client
) -> None:
    path = f"/v1/canary-endpoints/{old.facts['canary']}"
    shares = lambda: {  # noqa: E731
        one["id"]: one["traffic_percentage"] for one in call(http, "GET", path)["deployments"]
    }
    until(lambda: shares().get(old.facts["baseline"]) == 100)
    asked = call(http, "POST", f"/v1/endpoints/{old.facts['canary']}/generate", json=PROMPT)
    assert asked["deployment_id"] == old.facts["baseline"]


def test_evaluations_batches_and_runs_are_read(old: Old, http: httpx.Client) -> None:
    facts = old.facts
    path = f"/v1/evaluations/{facts['evaluation']}"
    evaluation = call(http, "GET", path)
    scored = evaluation["examples"]["scored"]
    assert scored > 0
    assert evaluation["graders"][0]["candidate"]["score"] is not None
    assert len(call(http, "GET", f"{path}/results", params={"limit": 1000})["results"]) == scored
    batch = call(http, "GET", f"/openai/v1/batches/{facts['batch']}")
    assert batch["output_file_id"] == facts["output_file"]
    content = http.get(f"/openai/v1/files/{facts['output_file']}/content").text
    assert len(content.splitlines()) == batch["request_counts"]["total"]
    run = call(http, "GET", f"/openai/v1/evals/{facts['eval']}/runs/{facts['run']}")
    assert run["status"] == "completed"


def test_the_training_that_was_killed_is_completed(old: Old, http: httpx.Client) -> None:
    """Its checkpoints name the folder of 26.12.0, which is not this one, so it begins again."""
    path = f"/v1/fine-tuning/jobs/{old.facts['stopped_job']}"
    until(lambda: call(http, "GET", path)["status"] in ("completed", "failed"))
    job = call(http, "GET", path)
    assert job["status"] == "completed", job
    assert "attempt 2 starts" in http.get(f"{path}/logs").text
    stored = [row["step"] for row in old.rows()["job_metrics"] if row["job_id"] == job["id"]]
    assert sorted(stored) == [*range(1, job["total_steps"] + 1)]


def test_a_release_is_recorded(serve: Serve, http: httpx.Client) -> None:
    """A key keeps its scopes, but the first one is replaced by one of this version's."""
    body = {"run_key": "r-1", "kind": "release"}
    assert http.post("/v1/releases", json=body).status_code == 403
    first = {"headers": serve.headers}
    path = f"/v1/releases/{call(http, 'POST', '/v1/releases', json=body, **first)['id']}"
    moment = datetime.now(UTC).isoformat()
    ended = {"kind": "ended", "at": moment, "outcome": "aborted", "reason": "failed"}
    body = {"record": RECORD, "first_line": 1, "lines": [{"kind": "begun", "at": moment}, ended]}
    assert call(http, "POST", f"{path}/lines", json=body, **first)["next_line"] == 3
    kinds = [one["type"] for one in call(http, "GET", "/v1/events?limit=1000", **first)["events"]]
    assert kinds[-1] == "release.ended"


def test_the_rows_and_files_of_both_versions_are_whole(
    old: Old, serve: Serve, http: httpx.Client
) -> None:
    assert call(http, "GET", "/v1/audit")["entries"]
    serve.stop()
    for arguments in (("check",), ("audit", "verify")):
        done = old.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_26_12_0_goes_on_without_the_events_that_it_does_not_know(
    old: Old, serve: Serve, tmp_path: Path
) -> None:
    older = first_release(tmp_path)
    if older is None:
        pytest.skip("the history is not here")
    serve.stop()
    page = (ROOT / "docs" / "installation.md").read_text()
    [statements] = re.findall("```sql\n(.*?)```", page, re.DOTALL)
    engine = sa.create_engine(old.url)
    with engine.begin() as connection:
        for statement in statements.strip().rstrip(";").split(";"):
            connection.execute(sa.text(statement))
    engine.dispose()
    back = Serve(old.data_dir, starter=older, **old.settings)
    try:
        answer = httpx.get(
            f"{back.url}/v1/events?limit=1000", headers=back.headers, trust_env=False
        )
        assert answer.status_code == 200, answer.text
    finally:
        back.stop()
