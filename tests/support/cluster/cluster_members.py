"""Three services as processes on one Postgres and one bucket, and a client for each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.processes import Serve, Starter, start
from tests.support.waiting import free_port
from tuneship.client import Client
from tuneship.contract.generation import Generate
from tuneship.security.master_key import read_or_make_secret
from tuneship.settings import ClientSettings

PROMPT = Generate(prompt="What is case 7?", max_tokens=4, temperature=0)


class Members:
    """Three processes, and a client for each."""

    def __init__(
        self, folder: Path, url: str, bucket: str, postgres: Cluster, **settings: str
    ) -> None:
        key = folder / "master.key"
        read_or_make_secret(key)
        self._folder = folder
        self.settings: dict[str, Any] = {
            "cluster": "test",
            "database_url": url,
            "blob_url": bucket,
            "master_key_file": str(key),
            "public_url": "http://cluster.test",
            "maximum_endpoints": "100000",
            **settings,
        }
        self._postgres, self._database = postgres, url.partition("?")[0].rpartition("/")[2]
        self.serves: list[Serve] = []
        self.addresses: list[str] = []
        self.clients: list[Client] = []

    def start(
        self, notice_s: int = 0, starter: Starter = start, names: Sequence[str] = ("a", "b", "c")
    ) -> None:
        """`starter`: runs their programs, e.g. of another version; `names`: of fewer members, `a` among them."""
        for name in names:
            port = free_port()
            options = {**self.settings, "drain_notice_s": str(notice_s)}
            place = ("--port", str(port))
            serve = Serve(self._folder / name, *place, starter=starter, **options)
            self.serves.append(serve)
            self.addresses.append(f"http://127.0.0.1:{port}")
        credentials = ClientSettings.from_credentials(self._folder / "a" / "credentials.json")
        self.clients += [
            Client(credentials.model_copy(update={"url": address})) for address in self.addresses
        ]

    @property
    def leader(self) -> Serve:
        """The process that leads now."""
        ((owner,),) = self.run("select owner from leaders")
        (found,) = [one for one in self.serves if owner.endswith(f":{one.process.pid}")]
        return found

    def run(self, statement: str) -> list[Any]:
        """Run a statement in their database; return its rows."""
        return self._postgres.run(statement, self._database)

    def live(self) -> list[Client]:
        return [
            client
            for serve, client in zip(self.serves, self.clients, strict=True)
            if serve.process.poll() is None
        ]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for serve in self.serves:
            if serve.process.poll() is None:
                serve.process.kill()  # no test is about their end
            serve.stop()
