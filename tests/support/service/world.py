"""A service with resources and API keys of every kind, on which tests try bad inputs."""

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tests.support.service import releases
from tests.support.service.in_process import Service, jsonl, split
from tuneship.contract.declaring.scopes import SCOPES
from tuneship.service.access.api_keys import new_key
from tuneship.store.database import tables
from tuneship.store.database.identifiers import new_id
from tuneship.store.records import idempotency

TURNS = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINE = b'{"instruction":"case","response":"chapter"}\n'
MANY: dict[str, Any] = {
    "<65 tags>": {f"k{number}": "v" for number in range(65)},
    "<long key>": {"k" * 129: "v"},
    "<101 ids>": [new_id("ds") for _ in range(101)],
    "<11 members>": split({new_id("dep"): share for share in (90, *range(10))})["deployments"],
}


class World:
    """A service with resources of two tenants, by name; its supervisor is stopped, so that only requests change it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.__enter__()
        self.ids = {
            f"{kind}_missing": new_id(kind)
            for kind in ("ft", "ds", "dep", "cep", "ep", "wh", "evt", "rel")
        }
        self._own()
        self._others()
        self._webhooks()
        service.rest()
        service.listen()
        self.ids |= {
            "dep_deleting": self._copy(tables.deployments, "dep_other", "dep", "deleting"),
            "dep_creating": self._copy(tables.deployments, "dep_other", "dep", "creating"),
            "dep_failed": self._copy(tables.deployments, "dep_other", "dep", "failed"),
            "dep_deleted": self._copy(tables.deployments, "dep_other", "dep", "deleted"),
            "ep_inactive": self._copy(tables.endpoints, "ep_own", "ep", "inactive"),
            "ep_deleted": self._copy(tables.endpoints, "ep_own", "ep", "deleted"),
            "ds_processing": self._copy(tables.datasets, "ds_own", "ds", "processing"),
            "ds_failed": self._copy(tables.datasets, "ds_own", "ds", "failed"),
        }
        self.keys = self._keys()
        self._use_idempotency_keys()

    def _own(self) -> None:
        service = self.service
        self.ids["model_own"] = service.model()
        self.ids["model_deployed"] = model = service.model()
        service.deployment("tuned", model_name=model)
        conversation = service.dataset(content=jsonl(TURNS, TURNS), format="conversation")
        in_use = service.dataset()
        self.ids |= {
            "ds_own": service.dataset(),
            "ds_single": service.dataset(content=LINE),
            "ds_conversation": conversation,
            "ft_own": service.job(dataset_id=in_use),
            "ds_in_use": in_use,
            "dep_own": service.deployment("own"),
            "dep_other": service.deployment("other"),
        }
        with service.database.read() as connection:
            ended = sa.select(tables.jobs.c.id).where(tables.jobs.c.status == "completed")
            self.ids["ft_ended"] = connection.scalars(ended.limit(1)).one()
        shares = {self.ids["dep_own"]: 90, self.ids["dep_other"]: 10}
        self.ids["cep_own"] = service.canary("own", shares)
        self.ids["ep_own"] = service.endpoint("plain", self.ids["dep_other"])
        self.ids["rel_own"] = releases.asked(
            service,
            "own",
            job=self.ids["ft_ended"],
            baseline=self.ids["dep_own"],
            candidate=self.ids["dep_other"],
            endpoint=self.ids["cep_own"],
        ).id
        self.ids["rel_begun"] = releases.PlayedPipeline(service, "begun").id
        self.ids["rel_ended"] = releases.ended(service, "ended").id

    def _others(self) -> None:
        service = self.service
        deployment = service.deployment("theirs", "bob")
        self.ids |= {
            "model_of_other_tenant": service.model("bob"),
            "ds_of_other_tenant": service.dataset("bob"),
            "ft_of_other_tenant": service.job("bob"),
            "dep_of_other_tenant": deployment,
            "cep_of_other_tenant": service.canary("theirs", {deployment: 100}, "bob"),
            "ep_of_other_tenant": service.endpoint("their plain one", deployment, "bob"),
            "rel_of_other_tenant": releases.asked(service, "theirs", "bob").id,
        }

    def _webhooks(self) -> None:
        """Make webhooks and queue an event for the first one; none is sent, because deliveries are not started."""
        service = self.service
        service.names["private.test"] = ["10.0.0.1"]
        for name, client in (
            ("wh_own", "alice"),
            ("wh_inactive", "alice"),
            ("wh_of_other_tenant", "bob"),
        ):
            answer = service.call(
                "POST", "/v1/webhooks", client, json=self.valid("POST /v1/webhooks")
            )
            self.ids[name] = answer.json()["id"]
        own = f"/v1/webhooks/{self.ids['wh_own']}"
        self.ids["evt_own"] = service.call("POST", f"{own}/test").json()["event_id"]
        off = {"active": False}
        service.call("PATCH", f"/v1/webhooks/{self.ids['wh_inactive']}", json=off)

    def _copy(self, table: sa.Table, source: str, kind: str, status: str) -> str:
        with self.service.database.write() as connection:
            query = sa.select(table).where(table.c.id == self.ids[source])
            row = dict(connection.execute(query).mappings().one())
            row |= {"id": new_id(kind), "status": status}
            connection.execute(sa.insert(table).values(**row))
        return row["id"]

    def _keys(self) -> dict[str, Any]:
        service = self.service
        full = service.headers["alice"]
        key = full["Authorization"]
        expired = service.keys.issue("alice", SCOPES, datetime.now(UTC) - timedelta(1))

        def holding(*scopes: str) -> dict[str, str]:
            return service.key_headers("alice", frozenset(scopes))

        return {
            "none": {},
            "only_client": {"X-Client-ID": "alice"},
            "only_key": {"Authorization": key},
            "two_clients": [*full.items(), ("X-Client-ID", "alice")],
            "revoked": {**full, "Authorization": f"Bearer {self._revoked()}"},
            "basic": {**full, "Authorization": "Basic dXNlcjpwYXNz"},
            "empty": {**full, "Authorization": "Bearer "},
            "unknown": {**full, "Authorization": f"Bearer {new_key()}"},
            "wrong_secret": {**full, "Authorization": _other_secret(key)},
            "not_ascii": {**full, "Authorization": (key[:-1] + "\xe9").encode("latin-1")},
            "crossed": {**full, "X-Client-ID": "bob"},
            "expired": {**full, "Authorization": f"Bearer {expired}"},
            "twice": [*full.items(), ("Authorization", service.headers["bob"]["Authorization"])],
            "sql": {**full, "X-Client-ID": "x' OR 1=1 --"},
            "reader": holding("jobs:read", "datasets:read", "models:read"),
            "deployer": holding("deployments:write", "models:read"),
        }

    def _revoked(self) -> str:
        key = self.service.keys.issue("alice", SCOPES, None)
        self.service.keys.revoke(key[4:12])
        return key

    def _use_idempotency_keys(self) -> None:
        body = json.dumps(self.valid("POST /v1/fine-tuning/jobs")).encode()
        headers = {"Idempotency-Key": "used", "Content-Type": "application/json"}
        self.service.call("POST", "/v1/fine-tuning/jobs", headers=headers, content=body)
        asked = f"POST\n/v1/fine-tuning/jobs\n{hashlib.sha256(body).hexdigest()}"
        key = idempotency.Key("alice", "busy", hashlib.sha256(asked.encode()).hexdigest())
        with self.service.database.write() as connection:
            idempotency.begin(connection, key, datetime.now(UTC))

    def valid(self, send: str) -> dict[str, Any]:
        """Return the smallest valid body of an operation."""
        ids = self.ids
        members = split({ids["dep_own"]: 50, ids["dep_other"]: 50})
        job = {"base_model": "tuneship-tiny", "dataset_id": ids["ds_own"], "model_name": "m"}
        return {
            "POST /v1/fine-tuning/jobs": job,
            "POST /v1/datasets/merge": {
                "dataset_ids": [ids["ds_own"], ids["ds_single"]],
                "name": "m",
            },
            "POST /v1/deployments": {"model_name": "tuneship-tiny", "deployment_name": "new"},
            "PATCH /v1/deployments/": {"min_replicas": 1},
            "POST /v1/endpoints": {"name": "new", "deployment_id": ids["dep_own"]},
            "PATCH /v1/endpoints/": {"deployment_id": ids["dep_own"]},
            "POST /v1/canary-endpoints": {"name": "new", **members},
            "PATCH /v1/canary-endpoints/": members,
            "POST /v1/webhooks": {"url": "https://receiver.test/hook", "events": ["*"]},
            "PATCH /v1/webhooks/": {"description": "new"},
            "generate": {"prompt": "a"},
            "embeddings": {"input": "a"},
        }[re.sub(r".*(generate|embeddings)$|(PATCH /v1/.*/){.*", r"\1\2", send)]

    def words(self, value: Any) -> Any:
        """Replace placeholders for ids, such as `{ds_own}`, and for long texts, such as `<300 characters>`."""
        if isinstance(value, dict):
            return {key: self.words(one) for key, one in value.items()}
        if isinstance(value, list):
            return [self.words(one) for one in value]
        if not isinstance(value, str):
            return value
        if value in MANY:
            return MANY[value]
        job = json.dumps(self.valid("POST /v1/fine-tuning/jobs"))[1:-1]
        text = re.sub(r"<(\d+) characters>", lambda found: "x" * int(found[1]), value)
        text = re.sub(
            r"<(\d+) arrays>", lambda found: "[" * int(found[1]) + "]" * int(found[1]), text
        )
        text = text.replace("<job>", job)
        return re.sub(r"{(\w+)}", lambda found: self.ids.get(found[1], found[0]), text)

    def state(self) -> tuple[Any, ...]:
        """Return all rows and files, except metrics, API keys and the audit chain, which also change on refusals."""
        ignored = {"metric_windows", "api_keys", "audit", "unlinked_audit"}
        with self.service.database.read() as connection:
            # As the driver returns them, since converting them takes three times as long; and as tuples, since
            # SQLAlchemy shortens long values when it prints a row of its own.
            rows = {
                name: sorted(
                    repr(tuple(row))
                    for row in connection.exec_driver_sql(f'select * from "{name}"')  # noqa: S608 - our own names
                )
                for name in tables.METADATA.tables
                if name not in ignored
            }
        root = self.service.settings.data_dir
        files = sorted(
            str(path) for name in ("blobs", "scratch", "work") for path in (root / name).rglob("*")
        )
        return rows, files


def _other_secret(authorization: str) -> str:
    from tuneship.service.access.api_keys import _checksum

    text = authorization.removeprefix("Bearer ")[:-7]
    begin = len("tsk_") + 8 + 1  # cut by length, because a secret may contain an underscore
    text = text[:begin] + text[begin:][::-1]
    return f"Bearer {text}_{_checksum(text)}"
