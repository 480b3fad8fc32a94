"""While the database or the disk is away every request reports it; when it is back everything continues by itself."""

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event

from tests.service.datasets.test_datasets import stored
from tests.support.databases.postgres_cluster import Cluster, programs
from tests.support.service.in_process import LINES, Service, jsonl
from tests.support.service.processes import (
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import until
from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate
from tuneship.store.database import rows, tables

both_databases = pytest.mark.both_databases


@contextmanager
def lost(service: Service, request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the database away inside the block."""
    url = service.settings.database_url
    if url is not None:
        cluster: Cluster = request.getfixturevalue("postgres")
        cluster.refuse(url.get_secret_value(), refuses=True)
        try:
            yield
        finally:
            cluster.refuse(url.get_secret_value(), refuses=False)
        return
    file = service.settings.data_dir / "tuneship.sqlite"
    # Write everything into the one file that is moved away.
    with sqlite3.connect(file) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    connection.close()
    service.database.engine.dispose()
    file.rename(file.with_suffix(".away"))
    file.mkdir()
    try:
        yield
    finally:
        file.rmdir()
        file.with_suffix(".away").rename(file)


@both_databases
def test_a_lost_database_is_503_in_the_one_error_body_and_comes_back(
    service: Service, request: pytest.FixtureRequest
) -> None:
    service.until(lambda: service.call("GET", "/readyz").status_code == 200)
    body = {"model_name": "tuneship-tiny", "deployment_name": "new"}
    asks: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", "/v1/datasets", {}),
        ("GET", "/v1/deployments/dep_00000000000000000000", {}),
        ("POST", "/v1/deployments", {"json": body}),
        ("POST", "/v1/deployments", {"json": body, "headers": {"Idempotency-Key": "one"}}),
        ("POST", "/v1/deployments/dep_00000000000000000000/generate", {"json": {"prompt": "a"}}),
    ]
    before = service.dataset()
    service.rest()  # else background work would hold a connection to the moved file
    with lost(service, request):
        asks.append(("GET", "/readyz", {}))
        service.until(lambda: service.call("GET", "/readyz").status_code == 503)
        assert service.call("GET", "/healthz").status_code == 200, "a restart would not help"
        for method, path, options in asks:
            answer = service.call(method, path, **options)
            assert answer.status_code == 503, (method, path, answer.text)
            assert answer.json()["error"]["code"] == "internal_error"
            assert 1 <= int(answer.headers["retry-after"]) <= 120
            assert answer.headers["x-should-retry"] == "true"
            text = answer.text.replace(answer.headers["x-request-id"], "").lower()
            for leak in ("sql", "connection", "tuneship_", str(service.settings.data_dir)):
                assert leak not in text
    service.until(lambda: service.call("GET", "/readyz").status_code == 200)
    assert service.call("GET", f"/v1/datasets/{before}").status_code == 200
    assert service.call(*asks[3][:2], **asks[3][2]).status_code == 201
    with service.database.read() as connection:
        assert rows.count(connection, tables.deployments) == 1


@pytest.mark.postgres
def test_a_session_that_ends_inside_a_transaction_is_503_and_leaves_nothing(
    tmp_path: Path, postgres: Cluster
) -> None:
    url = postgres.new_database()
    name, cuts = url.partition("?")[0].rpartition("/")[2], iter((True,))

    def cut(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("INSERT INTO deployments") and next(cuts, False):
            sessions = f"pg_stat_activity where datname = '{name}'"
            postgres.run(f"select pg_terminate_backend(pid) from {sessions}")  # noqa: S608

    with Service(tmp_path, database_url=url) as service:
        event.listen(service.database.engine, "before_cursor_execute", cut)
        body = {"model_name": "tuneship-tiny", "deployment_name": "new"}
        options: dict[str, Any] = {"json": body, "headers": {"Idempotency-Key": "one"}}
        answers = [service.call("POST", "/v1/deployments", **options) for _ in range(2)]
        with service.database.read() as connection:
            made = rows.count(connection, tables.deployments)
    assert [one.status_code for one in answers] == [503, 201]
    assert made == 1


@pytest.mark.postgres
def test_background_work_survives_a_lost_postgres(tmp_path: Path, postgres: Cluster) -> None:
    url = postgres.new_database()
    with Service(tmp_path, database_url=url) as service:
        job_id = service.job()
        service.trainer().start_of(2)
        postgres.refuse(url, refuses=True)
        service.until(lambda: service.call("GET", "/readyz").status_code == 503)
        service.trainer().complete()
        postgres.refuse(url, refuses=False)
        service.until(lambda: service.job_status(job_id) == "completed")


def test_a_full_disk_is_503_and_a_repeat_makes_one_job(service: Service) -> None:
    body = {"base_model": "tuneship-tiny", "dataset_id": service.dataset(), "model_name": "m"}
    body |= {"tags": {f"k{number}": "v" * 512 for number in range(64)}}
    headers = {"Idempotency-Key": "full"}

    def limit(connection: Any, *_: Any) -> None:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")

    service.rest()  # the pool is replaced, so nothing else may hold a connection of the old one
    event.listen(service.database.engine, "connect", limit)
    service.database.engine.dispose()
    answer = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
    event.remove(service.database.engine, "connect", limit)
    service.database.engine.dispose()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "internal_error")
    assert int(answer.headers["retry-after"]) >= 1
    again = service.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)
    assert again.status_code in (201, 409)
    with service.database.read() as connection:
        assert rows.count(connection, tables.jobs) == (again.status_code == 201)


@both_databases
def test_a_commit_that_nobody_knows_of_keeps_the_file_of_its_dataset(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commit, but lose the answer: the client gets 503, repeats its request, and finds everything in place."""
    engine = service.database.engine
    commit, inserting = engine.dialect.do_commit, list[object]()

    def note(_connection: object, cursor: Any, statement: str, *_: object) -> None:
        inserting.extend([cursor.connection] * statement.startswith("INSERT INTO datasets"))

    def lose(connection: Any) -> None:
        commit(connection)
        # The service commits on other connections, too.
        if connection.dbapi_connection in inserting:
            inserting.clear()
            raise engine.dialect.dbapi.OperationalError("the answer is lost")  # type: ignore[union-attr]

    event.listen(engine, "before_cursor_execute", note)
    request: dict[str, Any] = {
        "data": {"name": "d", "format": "instruction"},
        "headers": {"Idempotency-Key": "one"},
    }

    def upload() -> httpx.Response:
        return service.call("POST", "/v1/datasets", files={"file": ("x", jsonl(*LINES))}, **request)

    with monkeypatch.context() as patched:
        patched.setattr(engine.dialect, "do_commit", lose)
        assert upload().status_code == 503
    again = upload()
    assert (again.status_code, again.headers["idempotent-replayed"]) == (201, "true")
    assert stored(service, again.json()["id"]) == jsonl(*LINES)


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    """Start a cluster that a test may stop."""
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL on this machine: .ci/run installs it")
    cluster = Cluster(found)
    yield cluster
    cluster.remove()


def second_service(data_dir: Path) -> tuple[int, str]:
    """Try to start another service; return its exit code and its error message."""
    command = [sys.executable, "-m", "tuneship.cli.main", "serve", "--port", "0"]
    run = subprocess.run(
        [*command, "--data-dir", str(data_dir)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,  # a service that is not refused, by mistake, would run for ever
    )
    return run.returncode, run.stderr.strip().rpartition("tuneship: ")[2]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.postgres
def test_the_whole_way_on_a_postgres_that_is_restarted_on_the_way(
    tmp_path: Path, own_cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload, train, deploy and generate; restart the database during the training and the service after it."""
    monkeypatch.setenv("TUNESHIP_DATABASE_URL", own_cluster.new_database())
    serve = Serve(tmp_path / "data")
    try:
        code, text = second_service(tmp_path / "other")
        assert (code, "is used with another data directory" in text) == (1, True)
        (tmp_path / "copied").mkdir()
        for name in ("database", "master.key"):
            shutil.copy(serve.data_dir / name, tmp_path / "copied")
        assert second_service(tmp_path / "copied") == (6, "another service runs on this database")
        client = serve.client()
        job_id = start_job(client, rows_file(tmp_path / "rows.jsonl", 64), epochs=4)
        until(lambda: client.jobs.get(job_id).current_step > 2)
        own_cluster.stop()
        with pytest.raises(ApiError) as away:
            client.jobs.get(job_id)
        assert away.value.status == 503
        own_cluster.start()
        job = ended_job(client, job_id)
        assert (job.status, job.current_step) == ("completed", job.total_steps)
        serve.kill()
        serve.start()
        client = serve.client()
        assert job.fine_tuned_model is not None
        made = running_deployment(client, "d", job.fine_tuned_model)
        assert client.deployments.generate(made, Generate(prompt="a", max_tokens=4)).usage
        assert not (serve.data_dir / "tuneship.sqlite").exists()
    finally:
        serve.stop()
