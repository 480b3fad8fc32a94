"""An installation that tests may damage; its rows and files are made by the product, but no server runs."""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from tests.support.objects.files import contents_below
from tuneship.cli.main import app
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.security.master_key import derived_secret
from tuneship.service.access.api_keys import Keys
from tuneship.service.access.data_keys import keyring_of
from tuneship.service.background.clock_watch import ClockWatch
from tuneship.service.events.audit import sign_head
from tuneship.service.open_installation import Installation, open_for_service
from tuneship.service.openai.batch_files import new_file, object_of
from tuneship.settings import ServiceSettings
from tuneship.store.database import rows, tables
from tuneship.store.database.database import sqlite_url
from tuneship.store.database.identifiers import new_id
from tuneship.store.files.blobs import DATA_FILE
from tuneship.store.records.audit import Chain
from tuneship.store.records.audit_heads import Heads, heads_file
from tuneship.store.records.batch_records import INPUT


class Installed:
    """A data directory and its database, in the state in which a service leaves them after its first start."""

    def __init__(self, data_dir: Path, **settings: Any) -> None:
        self.data_dir = data_dir
        self.options = settings
        for name in ("blobs", "scratch", "work", "logs"):
            (data_dir / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        data_dir.chmod(0o700)

    @property
    def settings(self) -> ServiceSettings:
        return ServiceSettings(data_dir=self.data_dir, **self.options)

    @contextmanager
    def started(self, later: timedelta = timedelta(), **options: Any) -> Iterator[Installation]:
        """Open the installation as a service does before it takes requests, and issue a first key."""
        clock = lambda: datetime.now(UTC) + later  # noqa: E731
        opened = open_for_service(self.settings, clock(), **options)
        try:
            self.keys(opened)
            ClockWatch(clock, last_seen=opened.last_seen).note_time(opened.database)
            yield opened
        finally:
            opened.database.close()

    def keys(self, opened: Installation) -> None:
        chain = Chain(derived_secret(opened.secret, "audit"))
        pepper = derived_secret(opened.secret, "keys")
        Keys(opened.database, pepper, lambda: datetime.now(UTC), chain).issue("acme", SCOPES, None)

    def sign_head(self, opened: Installation) -> None:
        """Link the audit rows and sign the head of their chain, as the service does every minute."""
        Chain(derived_secret(opened.secret, "audit")).link_all(opened.database)
        file = heads_file(self.settings.audit_heads, self.data_dir)
        heads = Heads(file, derived_secret(opened.secret, "audit heads"))
        sign_head(opened.database, heads, datetime.now(UTC))

    def add_dataset(self, opened: Installation, content: bytes = b"{}\n") -> str:
        """Store a sealed dataset of the tenant `acme` and return its id."""
        now, identifier = datetime.now(UTC), new_id("ds")
        blob = f"datasets/{identifier}/{DATA_FILE}"
        blobs = opened.blobs
        with blobs.staged() as staged:
            staged.write(content)
            blobs.keep(staged, blob)
            row = {
                "id": identifier, "client_id": "acme", "created_at": now, "updated_at": now, "tags": {},
                "name": "n", "description": "", "format": "instruction", "status": "processed",
                "num_examples": 1, "prompt_tokens": 1, "response_tokens": 1, "tokenizer": "t",
                "blob": blob, "sha256": staged.sha256, "bytes": staged.size,
            }  # fmt: skip
        with opened.database.write() as connection:
            rows.insert(connection, tables.datasets, row)
            keyring = keyring_of(opened.secret)
            keyring.add(connection, "acme", f"datasets/{identifier}", staged.key, now)
        return identifier

    def add_batch_file(self, opened: Installation) -> str:
        """Store a sealed file of requests of the tenant `acme` and return its id."""
        now = datetime.now(UTC)
        row, keyring = new_file("acme", "n", INPUT, now), keyring_of(opened.secret)
        with opened.blobs.staged() as staged:
            staged.write(b"{}\n")
            opened.blobs.keep(staged, row["blob"])
        row |= {"sha256": staged.sha256, "bytes": staged.size}
        with opened.database.write() as connection:
            rows.insert(connection, tables.batch_files, row)
            keyring.add(connection, "acme", object_of(row["id"]), staged.key, now)
        return row["id"]

    def add_model(self, opened: Installation) -> str:
        """Store a model whose file is no adapter, and return the id of its job."""
        now, job_id = datetime.now(UTC), new_id("ft")
        folder = self.data_dir / "blobs" / "models" / job_id
        folder.mkdir(parents=True)
        (folder / "adapter.bin").write_bytes(job_id.encode())
        row = {
            "id": f"ft:tuneship-tiny:m:{job_id}", "client_id": "acme", "created_at": now,
            "updated_at": now, "tags": {}, "base_model": "tuneship-tiny", "name": "m",
            "job_id": job_id, "fine_tuning_method": "lora", "blob": f"models/{job_id}",
            "sha256": {"adapter.bin": hashlib.sha256(job_id.encode()).hexdigest()},
        }  # fmt: skip
        with opened.database.write() as connection:
            rows.insert(connection, tables.models, row)
            keyring_of(opened.secret).make(connection, "acme", row["blob"], now)
        return job_id

    def files(self) -> dict[Path, bytes]:
        """Contents of all files that belong to users."""
        return contents_below(self.data_dir / "blobs") | contents_below(self.data_dir / "work")

    def serve(self, *arguments: str) -> Result:
        """Run a `tuneship serve` that must refuse to start."""
        place = ["--port", "0", "--data-dir", str(self.data_dir)]
        return CliRunner().invoke(app, ["serve", *place, *arguments], env=self._environment())

    def run(self, *arguments: str) -> Result:
        """Run another command of `tuneship`."""
        place = ["--data-dir", str(self.data_dir)]
        return CliRunner().invoke(app, [*arguments, *place], env=self._environment())

    def _environment(self) -> dict[str, str]:
        return {f"TUNESHIP_{name.upper()}": str(value) for name, value in self.options.items()}

    def refused(self, *arguments: str) -> str:
        """Check that a start is refused with one message and changes no file; return the message."""
        before = self.files()
        done = self.serve(*arguments)
        assert done.exit_code == 1, done.output
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("tuneship: ")
        assert self.files() == before
        return lines[0].removeprefix("tuneship: ")


class Sqlite:
    """Actions of an operator on an SQLite file."""

    def __init__(self, file: Path) -> None:
        self.url = sqlite_url(file)
        self._file = file
        self._kept = file.with_name(f"kept-{file.name}")

    def keep(self) -> None:
        shutil.copy(self._file, self._kept)

    def put_back(self) -> None:
        shutil.copy(self._kept, self._file)

    def lose(self) -> None:
        self._file.unlink()

    def move(self) -> str:
        """Rename the file and return its new URL."""
        return sqlite_url(self._file.rename(self._file.with_name("moved.sqlite")))


class Postgres:
    """Actions of an operator on a database of a Postgres server."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._name = "operated"
        self.url = cluster.url(self._name)
        cluster.run(f"drop database if exists {self._name} with (force)")
        cluster.run("drop database if exists kept with (force)")
        cluster.run(f"create database {self._name}")

    def keep(self) -> None:
        self._cluster.run("drop database if exists kept with (force)")
        self._cluster.run(f"create database kept template {self._name}")

    def put_back(self) -> None:
        self._cluster.run(f"drop database if exists {self._name} with (force)")
        self._cluster.run(f"create database {self._name} template kept")

    def lose(self) -> None:
        self._cluster.run(f"drop database {self._name} with (force)")
        self._cluster.run(f"create database {self._name}")

    def move(self) -> str:
        self._cluster.run("drop database if exists moved with (force)")
        self._cluster.run(f"alter database {self._name} rename to moved")
        return self._cluster.url("moved")
