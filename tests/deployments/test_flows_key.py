"""The key of `make up`'s flows is replaced without a run that loses its key, whenever the command is killed."""

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.flows_key import FlowsKey
from tests.support.databases.sqlite_files import new_sqlite
from tuneship.cli.commands.keys import opened, utc_now
from tuneship.cli.main import app
from tuneship.contract.declaring.scopes import PRESETS
from tuneship.security.master_key import read_or_make_secret
from tuneship.service.access.api_keys import read_credentials, write_credentials
from tuneship.store.database.database import SQLITE_FILE

DAY = timedelta(days=1)


class Flows:
    """The flows' key on the data of a service, and what the service knows about its keys."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "run" / "flows-key"
        self.data_dir = folder / "data"
        for one in (self.data_dir, self.file.parent):
            one.mkdir()
        new_sqlite(self.data_dir / SQLITE_FILE)
        read_or_make_secret(self.data_dir / "master.key")
        self.key = FlowsKey(self.data_dir, self.file)

    @property
    def held(self) -> str:
        """The id of the key in the file."""
        return read_credentials(self.file)["api_key"][4:12]

    def read(self) -> str:
        """Read the settings as `up` does, and return the id of the key in them."""
        return self.key.settings("http://here").api_key.get_secret_value()[4:12]

    def up(self) -> str:
        """All of an `up`."""
        read = self.read()
        self.key.settle()
        assert read == self.held
        return read

    def life(self, identifier: str) -> timedelta:
        """How long a key is still in force, in whole days."""
        with opened(self.data_dir) as keys:
            (row,) = (row for row in keys.listed() if row["id"] == identifier)
            ends: datetime | None = row["revoked_at"] or row["expires_at"]
        assert ends is not None
        return max(timedelta(0), round((ends - utc_now()) / DAY) * DAY)

    def write(self, scopes: frozenset[str], now: datetime) -> str:
        """Write a key as an `up` at another time has done it, perhaps of another version."""
        with opened(self.data_dir) as keys:
            write_credentials(keys, self.file, "http://here", now, scopes, self.key._label)
        return self.held

    def lengths(self) -> list[int]:
        """How many days the keys are still in force that have not ended."""
        with opened(self.data_dir) as keys:
            found = [row["id"] for row in keys.listed()]
        return sorted(days for one in found if (days := self.life(one).days))


@pytest.fixture
def flows(tmp_path: Path) -> Flows:
    return Flows(tmp_path)


def test_a_good_key_stays(flows: Flows) -> None:
    assert flows.up() == flows.up()
    assert flows.lengths() == [90]
    assert flows.file.stat().st_mode & 0o777 == 0o600


def test_a_key_with_the_scopes_of_an_earlier_version_is_good_for_a_day(flows: Flows) -> None:
    old = flows.write(PRESETS["operator"], utc_now())
    assert flows.up() != old
    assert flows.lengths() == [1, 90]
    assert flows.life(old) == DAY


def test_a_key_that_ends_soon_is_good_until_then(flows: Flows) -> None:
    old = flows.write(PRESETS["pipeline"], utc_now() - 70 * DAY)
    assert flows.up() != old
    assert flows.lengths() == [20, 90]


def test_the_key_of_a_lost_file_is_revoked_once_the_flows_have_a_new_one(flows: Flows) -> None:
    old = flows.up()
    flows.file.unlink()
    new = flows.read()
    assert flows.lengths() == [90, 90]
    flows.key.settle()
    assert (flows.lengths(), flows.held, new != old) == ([90], new, True)


@pytest.mark.parametrize(("is_lost", "left"), [(True, [90]), (False, [1, 90])])
def test_an_up_that_was_killed_before_the_flows_had_the_new_key_is_made_good(
    flows: Flows, is_lost: bool, left: list[int]
) -> None:
    old = flows.write(PRESETS["operator"], utc_now())
    if is_lost:
        flows.file.unlink()
    killed = flows.read()
    assert flows.life(old).days == 90
    assert flows.up() == killed
    assert flows.lengths() == left


def test_a_key_that_an_operator_has_rotated_is_that_of_the_next_up(flows: Flows) -> None:
    place = ("--data-dir", str(flows.data_dir))
    done = CliRunner().invoke(app, ["keys", "rotate", flows.up(), *place])
    assert flows.up() == done.stdout[4:12]
    assert flows.lengths() == [90]


def test_a_key_that_an_operator_has_rotated_without_the_file_is_not_ended(flows: Flows) -> None:
    old = flows.up()
    with opened(flows.data_dir) as keys:
        keys.rotate(old, utc_now() + 80 * DAY, 60 * DAY)
    assert flows.up() == old
    assert flows.lengths() == [60, 80]
