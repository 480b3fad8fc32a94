"""The key of the flows: a separate key with only the scopes that the flows need."""

from datetime import timedelta
from pathlib import Path

from tuneship.cli.commands.keys import FLOWS_LABEL, opened, utc_now
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.service.access.api_keys import (
    RENEW_BEFORE,
    is_in_force,
    key_id,
    read_credentials,
    write_credentials,
)
from tuneship.settings import ClientSettings

SCOPES = PRESETS["pipeline"]
# Flows that run go on with the key that they have read.
OVERLAP = timedelta(days=1)


class FlowsKey:
    """The key and its file (0600). A new key lies in a file beside it until Prefect's block has it.

    Both functions exit with a line when the service's database cannot be opened.
    """

    def __init__(self, data_dir: Path, file: Path) -> None:
        """`data_dir` is the service's."""
        self._data_dir = data_dir
        self._file = file.absolute()
        self._new = self._file.with_name(f"{file.name}.new")
        self._label = f"{FLOWS_LABEL}{self._file}"[:128]

    def settings(self, url: str) -> ClientSettings:
        """Read the flows' settings, with a new key where the kept one is missing, ends soon or has other scopes."""
        with opened(self._data_dir) as keys:
            now = utc_now()
            kept = read_credentials(self._file).get("api_key", "")
            is_kept = keys.is_good_for(kept, SCOPES, now + RENEW_BEFORE)
            # An `up` that was killed has left a new one, and perhaps put it into the block.
            file = self._file if is_kept and not self._new.exists() else self._new
            write_credentials(keys, file, url, now, SCOPES, self._label)
        return ClientSettings.from_credentials(file)

    def settle(self) -> None:
        """End the keys before a new one, which the block now has, and put that one into the file."""
        if not self._new.exists():
            return
        new, kept = (
            key_id(read_credentials(file).get("api_key", "")) for file in (self._new, self._file)
        )
        with opened(self._data_dir) as keys:
            now = utc_now()
            for row in keys.listed():
                if row["label"] != self._label or row["id"] == new or not is_in_force(row, now):
                    continue
                # The file was lost, and somebody else may have it.
                if kept is None:
                    keys.revoke(row["id"])
                # One that has the old scopes; one that ends soon anyway lives on until then.
                elif row["id"] == kept and is_in_force(row, now + RENEW_BEFORE):
                    # Only `rotate` lets a key end later; the key that it makes with the old scopes has ended already.
                    keys.rotate(kept, now, OVERLAP)
        self._new.replace(self._file)
