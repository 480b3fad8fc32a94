"""Datasets, models and deployments as assets of Prefect: each release leaves an event of what it made, and from what.

The keys hold ids only, the metadata digests and numbers. The open-source server stores these events and shows them in
its event feed; it has no page of assets, which Prefect Cloud has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect import get_run_logger
from prefect.assets import Asset, AssetProperties, add_asset_metadata
from prefect.cache_policies import NO_CACHE
from prefect.tasks import MaterializingTask

from tuneship.client import base_url
from tuneship.prefect.connection import api

# By the kind of the asset: its place in the API, and in the key.
PLACES = {"dataset": "datasets", "model": "models", "deployment": "deployments"}


def asset_key(kind: str, resource_id: str) -> str:
    """The key of an asset, e.g. `tuneship://datasets/ds_4k2m...`."""
    return f"tuneship://{PLACES[kind]}/{resource_id}"


def materialize_asset(
    kind: str, resource_id: str, metadata: Mapping[str, Any], made_from: Sequence[str] = ()
) -> None:
    """Record that this run made the asset, from those with the keys `made_from`; a failure never stops a release."""
    try:
        url = f"{base_url(api().settings.url)}/v1/{PLACES[kind]}/{resource_id}"
        asset = Asset(
            key=asset_key(kind, resource_id),
            properties=AssetProperties(name=resource_id, url=url),
        )

        # Without parameters: Prefect would link them to the runs that returned the same strings.
        def materialize() -> None:
            add_asset_metadata(asset, dict(metadata))

        task = MaterializingTask(
            materialize,
            assets=[asset],
            materialized_by="tuneship",
            asset_deps=list(made_from),
            name=f"materialize-{kind}",
            task_run_name=f"materialize-{kind}",
            cache_policy=NO_CACHE,
            persist_result=False,
        )
        task()
    except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the release matters more
        get_run_logger().warning("an asset was not recorded (%s)", type(error).__name__)
