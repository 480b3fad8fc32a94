"""Two members answer for more models than a replica keeps at hand, each by its own adapter, and go on."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest

from tests.support.cluster.cluster_members import Members
from tests.support.databases.postgres_cluster import Cluster
from tests.support.models.random_adapters import random_adapter, stored_model, texts_of
from tests.support.service.processes import running_deployment
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.generation import Generate
from tuneship.security.master_key import read_or_make_secret
from tuneship.security.sealed_files import new_key
from tuneship.service.access.data_keys import keyring_of
from tuneship.serving.lora import SPARE_SLOTS
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.files.blob_cache import BlobCache
from tuneship.store.files.object_blobs import ObjectBlobs

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.long]

PROMPT, MAX_TOKENS = "What is case 7?", 6
CLIENTS = 4


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    limits = {"generate_requests_per_minute": "0", "maximum_deployments": "1000"}
    members = Members(tmp_path, postgres.new_database(), bucket, postgres, **limits)
    try:
        yield members
    finally:
        members.close()


@pytest.mark.parametrize(
    ("models", "deployments", "names"),
    [(60, SPARE_SLOTS + 8, "ab"), pytest.param(1000, 200, "abc", marks=pytest.mark.soak)],
)
def test_each_of_many_deployments_answers_by_its_own_model_at_every_member(
    members: Members, tmp_path: Path, models: int, deployments: int, names: str
) -> None:
    members.start(names=names)
    numbers = range(models)
    adapters = {f"m{number}": random_adapter(tmp_path / f"m{number}", number) for number in numbers}
    ids = stored_models(members, adapters, tmp_path)
    chosen = [*adapters][:deployments]
    texts = texts_of({name: adapters[name] for name in chosen}, PROMPT, MAX_TOKENS)
    assert len(set(texts.values())) > deployments / 2, "the adapters hardly differ"
    clients = members.clients
    made = {
        name: client.deployments.create(
            DeploymentCreate(model_name=ids[name], deployment_name=name)
        ).id
        for name, client in zip(chosen, cycle(clients), strict=False)
    }
    for name in chosen:
        until(partial(is_running, clients[0], made[name]))
    # Twice and in another order the second time: by then a replica has put the first ones aside for the last.
    for order in (chosen, chosen[::-1]):
        for client in clients:
            assert asked(client, {name: made[name] for name in order}) == texts
    # The leader still sees to what changes.
    clients[-1].deployments.delete(made[chosen[0]])
    until(lambda: clients[0].deployments.get(made[chosen[0]]).status == "deleted")
    running_deployment(clients[-1], "again", ids[chosen[0]])


def stored_models(members: Members, adapters: dict[str, Path], folder: Path) -> dict[str, str]:
    """Store the adapters as models of the members' tenant; returns their ids by name."""
    client_id = members.clients[0].settings.client_id
    blobs = ObjectBlobs(members.settings["blob_url"], BlobCache(folder / "copies", 1 << 30))
    key, keyring = (
        new_key(),
        keyring_of(read_or_make_secret(Path(members.settings["master_key_file"]))),
    )
    found = {name: stored_model(blobs, one, client_id, name, key) for name, one in adapters.items()}
    with (
        closing(Database(members.settings["database_url"], is_shared=True)) as database,
        database.write(client_id) as connection,
    ):
        for row in found.values():
            rows.insert(connection, tables.models, row)
            keyring.add(connection, client_id, row["blob"], key, row["created_at"])
    return {name: row["id"] for name, row in found.items()}


def is_running(client: Client, deployment: str) -> bool:
    return client.deployments.get(deployment).status == "running"


def asked(client: Client, deployments: dict[str, str]) -> dict[str, str]:
    """Ask deployments, several at once; returns their texts by name."""
    question = Generate(prompt=PROMPT, max_tokens=MAX_TOKENS, temperature=0)

    def ask(deployment: str) -> str:
        return client.deployments.generate(deployment, question).completion

    with ThreadPoolExecutor(CLIENTS) as threads:
        return dict(zip(deployments, threads.map(ask, deployments.values()), strict=True))
