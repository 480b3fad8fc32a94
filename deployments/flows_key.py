"""The API key of the flows: one of their own, which may do what they do and no more."""

from pathlib import Path

from tuneship.cli.keys import opened, utc_now
from tuneship.contract.scopes import PRESETS
from tuneship.service.access.api_keys import (
    RENEW_BEFORE,
    is_in_force,
    key_id,
    read_credentials,
    write_credentials,
)
from tuneship.settings import ClientSettings


def flows_settings(url: str, data_dir: Path, file: Path) -> ClientSettings:
    """Read the flows' settings from this file (0600), with a new key where the kept one is missing or ends soon."""
    label = f"make up, {file}"[:128]
    with opened(data_dir) as keys:
        now = utc_now()
        write_credentials(keys, file, url, now, PRESETS["pipeline"], label)
        kept = key_id(read_credentials(file)["api_key"])
        for row in keys.listed():
            # A key that was renewed ends by itself, because running flows hold it; others are of a file that was lost.
            if row["label"] == label and row["id"] != kept and is_in_force(row, now + RENEW_BEFORE):
                keys.revoke(row["id"])
    return ClientSettings.from_credentials(file)
