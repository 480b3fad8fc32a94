"""`tuneship keys` works on the data of a service, running or not, and every complaint is one helpful line."""

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from typer import Exit
from typer.testing import CliRunner, Result

from tests.support.service.processes import Serve
from tuneship.cli.commands.audit import BROKEN, NO_HEADS
from tuneship.cli.commands.keys import FLOWS_LABEL, opened
from tuneship.cli.main import app
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.contract.errors import AuthenticationError
from tuneship.security.master_key import derived_secret, read_or_make_secret
from tuneship.service.access.api_keys import Keys, key_id, read_credentials, write_credentials
from tuneship.service.events.audit import sign_head
from tuneship.store.database.database import Database, sqlite_url
from tuneship.store.records import audit
from tuneship.store.records.audit import Chain
from tuneship.store.records.audit_heads import HEADS_FILE, Heads, HeadsDamaged

pytestmark = pytest.mark.both_databases(postgres="soak")

LISTED = {
    "key_id", "client_id", "scopes", "label", "state", "created_at", "expires_at", "revoked_at",
    "last_used_at",
}  # fmt: skip


class Installation:
    """A data directory as a service leaves it, and the command line that works on it."""

    def __init__(self, data_dir: Path, url: str) -> None:
        self.data_dir = data_dir
        secret = read_or_make_secret(data_dir / "master.key")
        self.database = Database(url)
        pepper = derived_secret(secret, "keys")
        self.chain = Chain(derived_secret(secret, "audit"))
        self.keys = Keys(self.database, pepper, lambda: datetime.now(UTC), self.chain)

    def run(self, *arguments: str) -> Result:
        place = () if "--data-dir" in arguments else ("--data-dir", str(self.data_dir))
        return CliRunner().invoke(app, ["keys", *arguments, *place])

    def json(self, *arguments: str) -> dict[str, Any]:
        done = self.run(*arguments, "--json")
        assert done.exit_code == 0, done.output
        self.chain.link_all(self.database)  # as the service does
        return json.loads(done.stdout)

    def recognises(self, key: str, client: str) -> bool:
        keys = Keys(
            self.database, self.keys._pepper, lambda: datetime.now(UTC), self.chain
        )  # no cache
        try:
            keys.authenticate([f"Bearer {key}"], [client])
        except AuthenticationError:
            return False
        return True


@pytest.fixture
def installed(
    tmp_path: Path,
    database_settings: Callable[[], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Installation]:
    chosen = database_settings()
    for name, value in chosen.items():
        monkeypatch.setenv(f"TUNESHIP_{name.upper()}", value)
    url = chosen.get("database_url", sqlite_url(tmp_path / "tuneship.sqlite"))
    installation = Installation(tmp_path, url)
    yield installation
    installation.database.close()


def test_a_key_is_made_and_works(installed: Installation) -> None:
    key = installed.json(
        "create", "--client-id", "acme", "--scopes", "inference,jobs:read", "--expires", "90d"
    )
    assert set(key) == {"key_id", "api_key", "client_id", "scopes", "expires_at"}
    assert key_id(key["api_key"]) == key["key_id"]
    assert (key["client_id"], key["scopes"]) == ("acme", ["generate", "jobs:read"])
    lives = datetime.fromisoformat(key["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=89, hours=23) < lives <= timedelta(days=90)
    assert installed.recognises(key["api_key"], "acme")
    assert not installed.recognises(key["api_key"], "other")


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_can_be_given(installed: Installation, preset: str) -> None:
    key = installed.json("create", "--client-id", "acme", "--scopes", preset)
    assert (key["scopes"], key["expires_at"]) == (sorted(PRESETS[preset]), None)


def test_a_key_is_shown_once_and_alone_on_standard_output(installed: Installation) -> None:
    created = installed.run("create", "--client-id", "acme", "--scopes", "viewer", "--label", "ci")
    key = created.stdout.strip()
    assert installed.recognises(key, "acme")
    assert "not shown again" in created.stderr
    for shown in (installed.run("list").output, installed.run("list", "--json").output):
        assert key[4:12] in shown
        assert key[13:56] not in shown


def test_keys_are_listed_for_programs_and_for_people(installed: Installation) -> None:
    for client, scopes in (("acme", "viewer,generate"), ("beta", "admin")):
        installed.run("create", "--client-id", client, "--scopes", scopes, "--label", "for x")
    found = installed.json("list")["keys"]
    assert [set(one) for one in found] == [LISTED] * 2
    assert [(one["client_id"], one["state"]) for one in found] == [
        ("acme", "in force"),
        ("beta", "in force"),
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found[0]["created_at"])
    names, *rows = installed.run("list").stdout.splitlines()
    piped = [dict(zip(names.split("\t"), row.split("\t"), strict=True)) for row in rows]
    assert [(one["key_id"], one["client_id"], one["label"]) for one in piped] == [
        (one["key_id"], one["client_id"], "for x") for one in found
    ]


def test_a_narrow_list_shows_keys_and_dates_whole(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("tuneship.cli.commands.keys.is_terminal", lambda: True)
    key = installed.json(
        *("create", "--client-id", "radiology-department", "--scopes", "viewer,generate"),
        *("--expires", "90d", "--label", "what the night's release uses"),
    )
    listing = installed.run("list").stdout
    assert key["key_id"] in listing
    assert key["expires_at"][:10] in listing
    assert "…" not in listing


def test_a_revoked_key_is_refused_and_stays_listed(installed: Installation) -> None:
    key = installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    ended = installed.json("revoke", key["key_id"])
    assert not installed.recognises(key["api_key"], "acme")
    assert installed.json("revoke", key["key_id"]) == ended  # a second time changes nothing
    assert installed.json("list")["keys"][0]["state"] == "revoked"


def test_a_rotated_key_hands_on_its_rights_and_its_lifetime(installed: Installation) -> None:
    old = installed.json("create", "--client-id", "acme", "--scopes", "operator", "--expires", "2w")
    new = installed.json("rotate", old["key_id"])
    assert new["replaces"] == old["key_id"]
    assert (new["client_id"], new["scopes"]) == ("acme", old["scopes"])
    lives = datetime.fromisoformat(new["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=13, hours=23) < lives <= timedelta(days=14)
    assert installed.recognises(new["api_key"], "acme")
    assert not installed.recognises(old["api_key"], "acme")


def test_a_key_can_be_rotated_while_its_callers_change_over(installed: Installation) -> None:
    old = installed.json("create", "--client-id", "acme", "--scopes", "operator")
    new = installed.json("rotate", old["key_id"], "--overlap", "24h", "--expires", "30m")
    assert all(installed.recognises(one["api_key"], "acme") for one in (old, new))
    ends = {one["key_id"]: one["expires_at"] for one in installed.json("list")["keys"]}
    left = datetime.fromisoformat(ends[old["key_id"]]) - datetime.now(UTC)
    assert timedelta(hours=23) < left <= timedelta(hours=24)
    assert installed.run("rotate", new["key_id"], "--expires", "never").exit_code == 0
    again = installed.json("list")["keys"][-1]["key_id"]
    never = installed.run("rotate", again, "--overlap", "never")  # must not mean: at once
    assert (never.exit_code, "no duration" in never.output) == (2, True)
    assert installed.json("list")["keys"][-1]["state"] == "in force"


def test_the_key_of_the_credentials_file_is_replaced_there_too(installed: Installation) -> None:
    file = installed.data_dir / "credentials.json"
    write_credentials(installed.keys, file, "http://here", datetime.now(UTC))
    old = read_credentials(file)
    new = installed.json("rotate", old["api_key"][4:12])
    kept = read_credentials(file)
    assert kept["api_key"] == new["api_key"] != old["api_key"]
    assert kept["base_url"] == "http://here"
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_key_of_the_flows_is_replaced_in_their_file_too(installed: Installation) -> None:
    file = installed.data_dir / "run" / "flows-key"
    file.parent.mkdir()
    label = f"{FLOWS_LABEL}{file}"
    now = datetime.now(UTC)
    write_credentials(installed.keys, file, "http://here", now, PRESETS["pipeline"], label)
    new = installed.json("rotate", read_credentials(file)["api_key"][4:12])
    assert read_credentials(file)["api_key"] == new["api_key"]


def test_the_keys_of_a_service_are_opened_without_a_lasting_change_of_new_files(
    installed: Installation,
) -> None:
    """`make up` starts bridge and worker from the process that has opened them."""
    before = os.umask(0o022)
    try:
        with opened(installed.data_dir):
            (installed.data_dir / "during").touch()
        (installed.data_dir / "after").touch()
        with pytest.raises(Exit), opened(installed.data_dir / "nowhere"):
            pass
        (installed.data_dir / "after a failure").touch()
    finally:
        os.umask(before)
    modes = {
        name: (installed.data_dir / name).stat().st_mode & 0o777
        for name in ("during", "after", "after a failure")
    }
    assert modes == {"during": 0o600, "after": 0o644, "after a failure": 0o644}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("create", "--client-id", "a", "--scopes", "jobs:raed"), 2, "'jobs:raed' is neither"),
        (("create", "--client-id", "a", "--scopes", ""), 2, "neither a scope nor a preset"),
        (("create", "--client-id", "a b", "--scopes", "admin"), 2, "--client-id takes"),
        (("create", "--client-id", "a", "--scopes", "admin", "--label", "a\nb"), 2, "--label"),
        (("create", "--client-id", "a", "--scopes", "admin", "--expires", "90"), 2, "no duration"),
        (("create", "--client-id", "a", "--scopes", "admin", "--expires", "0d"), 2, "no duration"),
        (("create", "--client-id", "a", "--scopes", "admin", "--expires", "-1d"), 2, "no duration"),
        (("rotate", "00000000"), 1, "there is no key 00000000"),
        (("revoke", "00000000"), 1, "there is no key 00000000"),
        (("list", "--data-dir", "/no/such/place"), 1, "no service has run on /no/such/place"),
    ],
)
def test_an_impossible_command_is_reported_in_one_line(
    installed: Installation, arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = installed.run(*arguments)
    assert (done.exit_code, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
    assert installed.keys.listed() == []


def test_an_ended_key_is_not_rotated(installed: Installation) -> None:
    key = installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    installed.run("revoke", key["key_id"])
    done = installed.run("rotate", key["key_id"])
    assert (done.exit_code, "not in force" in done.stderr) == (1, True)
    assert len(installed.keys.listed()) == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql+psycopg://someone:secret@127.0.0.1:1/nothing", "cannot be opened"),
        ("mysql://someone:secret@127.0.0.1:1/nothing", "must begin with sqlite or postgresql"),
        ("secret", "is not one that SQLAlchemy reads"),
    ],
)
def test_a_database_that_cannot_be_used_is_a_complaint_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, says: str
) -> None:
    read_or_make_secret(tmp_path / "master.key")
    monkeypatch.setenv("TUNESHIP_DATABASE_URL", url)
    done = CliRunner().invoke(app, ["keys", "list", "--data-dir", str(tmp_path)])
    assert (done.exit_code, says in done.stderr) == (1, True), done.stderr
    assert "secret" not in done.output


def test_keys_are_not_made_in_a_database_that_the_service_does_not_use(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed.data_dir / "database").write_text("sqlite in this directory\n")
    (installed.data_dir / "tuneship.sqlite").touch()
    url = "postgresql+psycopg://someone:secret@127.0.0.1:1/nothing"
    monkeypatch.setenv("TUNESHIP_DATABASE_URL", url)
    done = installed.run("create", "--client-id", "acme", "--scopes", "viewer")
    assert (done.exit_code, "belong to the database" in done.stderr) == (1, True)
    assert "secret" not in done.output


def test_a_setting_of_the_environment_that_cannot_be_read_is_named(
    installed: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNESHIP_PORT", "many")
    done = installed.run("list")
    assert (done.exit_code, done.stderr) == (
        1,
        "tuneship: a setting is not valid: TUNESHIP_PORT must be a valid integer\n",
    )


@pytest.mark.parametrize(
    ("host", "why"), [("127.0.0.1", "in use"), ("no-such.invalid", "known|resol")]
)
def test_a_service_that_cannot_listen_says_where(tmp_path: Path, host: str, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--host", host, "--port", str(port), "--data-dir", str(tmp_path)]
        done = CliRunner().invoke(app, ["serve", *options])
    assert done.exit_code == 1
    assert re.search(rf"cannot start: .*{host} port {port}: .*({why}).*--port", done.stderr)


def test_a_database_file_that_cannot_be_opened_is_reported_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "tuneship.sqlite").mkdir()
    done = CliRunner().invoke(app, ["serve", "--port", "0", "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert f"cannot open its database: {tmp_path}: unable to open database file" in done.stderr


def test_the_light_install_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "master.key").write_text("00" * 32)
    program = (
        "import sys; sys.modules['sqlalchemy'] = None\n"
        "from tuneship.cli.main import app\n"
        f"app(['keys', 'list', '--data-dir', {str(tmp_path)!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pip install 'tuneship[service]'" in done.stderr


@pytest.mark.slow
def test_a_running_service_obeys_within_a_second(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data")

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}", "X-Client-ID": "acme"}
        return httpx.get(f"{serve.url}/v1/datasets", headers=headers, timeout=300).status_code

    def run(*arguments: str) -> dict[str, Any]:
        options = ["--data-dir", str(serve.data_dir), "--json"]
        done = CliRunner().invoke(app, ["keys", *arguments, *options])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    try:
        created = run("create", "--client-id", "acme", "--scopes", "viewer")
        assert status(created["api_key"]) == 200
        new = run("rotate", created["key_id"])
        time.sleep(1)
        assert (status(created["api_key"]), status(new["api_key"])) == (401, 200)
        run("revoke", new["key_id"])
        time.sleep(1)
        assert status(new["api_key"]) == 401
        listed = run("list")["keys"]
        assert {one["client_id"] for one in listed} == {"acme", "local"}
        assert read_credentials(serve.data_dir / "credentials.json")["client_id"] == "local"
    finally:
        serve.stop()
    listed = run("list")["keys"]  # the service stored the uses when it stopped
    assert all(one["last_used_at"] for one in listed if one["client_id"] == "acme")
    assert frozenset(listed[0]["scopes"]) == PRESETS["admin"]


def test_every_key_that_is_made_replaced_or_ended_is_in_the_audit_chain(
    installed: Installation,
) -> None:
    first = installed.json("create", "--client-id", "acme", "--scopes", "viewer")["key_id"]
    second = installed.json("rotate", first)["key_id"]
    installed.json("revoke", second)
    installed.json("revoke", second)
    with installed.database.read() as connection:
        rows = list(audit.rows_of(connection, client_id="acme"))
        assert installed.chain.fault(audit.rows_of(connection)) is None
    assert [(row["action"], row["resource_id"]) for row in rows] == [
        ("create_key", first),
        ("create_key", second),
        ("rotate_key", first),
        ("revoke_key", second),
    ]


def audit_command(installed: Installation, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["audit", *arguments, "--data-dir", str(installed.data_dir)])


def test_the_audit_chain_is_verified_with_the_heads_that_were_signed(
    installed: Installation,
) -> None:
    for _ in range(3):
        installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    secret = read_or_make_secret(installed.data_dir / "master.key")
    heads = Heads(installed.data_dir / HEADS_FILE, derived_secret(secret, "audit heads"))
    sign_head(installed.database, heads, datetime.now(UTC))
    good = audit_command(installed, "verify")
    assert (good.exit_code, good.stdout) == (
        0,
        "the chain is unbroken: 3 rows, with 1 signed head\n",
    )
    table = audit.audit
    with installed.database.write() as connection:
        connection.execute(sa.delete(table).where(table.c.seq == 3))
    short = audit_command(installed, "verify")
    assert (short.exit_code, short.stderr) == (
        4,
        "tuneship: rows 3 to 3 were removed from the end\n",
    )
    installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    again = audit_command(installed, "verify")
    assert again.exit_code == 4
    assert "row 3 is not the one that was signed" in again.stderr
    with installed.database.write() as connection:
        connection.execute(sa.update(table).where(table.c.seq == 2).values(action="x"))
    broken = audit_command(installed, "verify")
    assert broken.exit_code == 4
    assert "broken at row 2" in broken.stderr
    (installed.data_dir / HEADS_FILE).write_text("{}\n")
    forged = audit_command(installed, "verify")
    assert (forged.exit_code, forged.stderr) == (
        4,
        "tuneship: signed heads: line 1 was not signed by this service\n",
    )


@pytest.mark.parametrize("content", [None, "", '{"seq": 1, "mac'])
def test_a_chain_without_signed_heads_is_not_called_whole(
    installed: Installation, content: str | None
) -> None:
    empty = audit_command(installed, "verify")
    assert empty.exit_code == 0  # there is nothing that could have been removed
    installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    file = installed.data_dir / HEADS_FILE
    if content is not None:
        file.write_text(content)
    alone = audit_command(installed, "verify")
    assert (alone.exit_code, alone.stdout) == (5, "")
    assert f"but {file} is missing or holds no signed head" in alone.stderr
    table = audit.audit
    with installed.database.write() as connection:
        connection.execute(sa.update(table).values(action="x"))
    assert audit_command(installed, "verify").exit_code == 4


def test_a_file_that_is_no_file_of_heads_is_not_cut(installed: Installation) -> None:
    """A setting that names the wrong file would cause this."""
    installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    file = installed.data_dir / "letter.txt"
    file.write_text("Dear Ann,\nsee you on Monday")
    secret = read_or_make_secret(installed.data_dir / "master.key")
    heads = Heads(file, derived_secret(secret, "audit heads"))
    with pytest.raises(
        HeadsDamaged, match=r"letter\.txt ends with something that is not a signed head"
    ):
        sign_head(installed.database, heads, datetime.now(UTC))
    assert file.read_text() == "Dear Ann,\nsee you on Monday"


def test_the_audit_chain_is_written_out_and_no_cell_is_a_formula(installed: Installation) -> None:
    installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    installed.json("create", "--client-id", "other", "--scopes", "viewer")
    person = {"issuer": "https://login.test", "subject": "=1", "name": "=2"}
    what = ("acme", "k", "=1+1", None, 200, "::1", "req")
    entry = audit.AuditRecord(datetime.now(UTC), *what, person=audit.Person(**person))
    with installed.database.write() as connection:
        installed.chain.add(connection, entry)
    installed.chain.link_all(installed.database)
    lines = audit_command(installed, "export", "--client-id", "acme").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 3]
    rest = audit_command(installed, "export", "--after", "1").stdout.splitlines()
    assert [json.loads(line)["client_id"] for line in rest] == ["other", "acme"]
    table = list(
        csv.DictReader(audit_command(installed, "export", "--format", "csv").stdout.splitlines())
    )
    assert [row["action"] for row in table] == ["create_key", "create_key", "'=1+1"]
    assert [row["person"] for row in table][:2] == ["", ""]
    assert json.loads(table[2]["person"]) == person


@pytest.mark.slow
def test_an_export_that_cannot_be_written_ends_with_one_line(installed: Installation) -> None:
    installed.json("create", "--client-id", "acme", "--scopes", "viewer")
    command = [sys.executable, "-m", "tuneship.cli.main", "audit", "export", "--data-dir"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, installed.data_dir],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    line = "tuneship: the export is not whole: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, line)


def test_rows_that_are_not_in_the_chain_yet_are_named(installed: Installation) -> None:
    entry = audit.AuditRecord(datetime.now(UTC), "acme", "k", "x", None, 200, "::1", "req")
    with installed.database.write("acme") as connection:
        installed.chain.add(connection, entry)
    verified, exported = audit_command(installed, "verify"), audit_command(installed, "export")
    if installed.database.is_sqlite:
        assert verified.exit_code == NO_HEADS, "the row is in the chain, and no head stands for it"
        assert (len(exported.stdout.splitlines()), exported.stderr) == (1, "")
        return
    assert verified.exit_code == 0
    assert "1 more row waits to be linked, since 20" in verified.stdout
    assert exported.stdout == ""
    assert "1 row is not in the chain yet" in exported.stderr
    table = audit.unlinked_audit
    with installed.database.write() as connection:
        connection.execute(sa.update(table).values(action="y"))
    forged = audit_command(installed, "verify")
    assert forged.exit_code == BROKEN
    assert "not written by the service: 1 of 1" in forged.stderr
    installed.chain.link_all(installed.database)
    with installed.database.read() as connection:
        assert list(audit.rows_of(connection)) == [], "nobody seals what somebody else has written"
