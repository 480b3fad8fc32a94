"""Sign-in to the console with a real provider of OpenID Connect, in a real browser that sees two sites."""

import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from tests.support.service.in_process import Service
from tests.ui.browser import Browser
from tests.ui.conftest import opened_window
from tuneship.store.records import audit

pytestmark = pytest.mark.slow
SOURCES = Path(__file__).parents[1] / "support" / "open_id"
# What the service calls itself. To the browser it is another site than the provider, which is at 127.0.0.1.
HOME = "http://service.test"
GROUPS = "groups: [{group: ml-operators, tenant: alice, scopes: [trainer]}]"
SECRET = "as long as secrets are: 0123456789"


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("provider") / "program"
    shutil.copytree(SOURCES, folder)
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm not found: the provider is a program for Node.js")
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    got = subprocess.run([npm, "ci", *options], cwd=folder, check=False, capture_output=True)
    if got.returncode:
        pytest.skip("oidc-provider cannot be fetched from the registry of npm")
    back, home = f"{HOME}/console/sign-in/openid/end", f"{HOME}/console/sign-in"
    process = subprocess.Popen(
        ["node", "provider.mjs", back, home, "others,ml-operators", SECRET],  # noqa: S607 - beside npm
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.terminate()
    process.wait(60)
    process.stdout.close()


@pytest.fixture
def service(tmp_path: Path, issuer: str) -> Iterator[Service]:
    (tmp_path / "groups.yaml").write_text(GROUPS)
    (tmp_path / "secret").write_text(SECRET)
    options = {
        "oidc_issuer": issuer,
        "oidc_client_id": "tuneship",
        "oidc_client_secret_file": tmp_path / "secret",
        "oidc_groups_file": tmp_path / "groups.yaml",
    }
    with Service(tmp_path / "data", **options) as started:
        started.listen()
        yield started


@pytest.fixture
def window(service: Service, tmp_path: Path) -> Iterator[Browser]:
    place = service.url.removeprefix("http://")
    # The provider's own pages ask for a font of another host.
    rules = f"MAP service.test {place}, MAP fonts.googleapis.com 127.0.0.1:1"
    with opened_window(tmp_path, f"--host-resolver-rules={rules}") as opened:
        yield opened


def sign_in(window: Browser, name: str, page: str = "/console/jobs") -> None:
    window.open(f"{HOME}{page}", shows="Sign in by OpenID Connect")
    window.attempt("document.querySelector('a[href*=openid]').click()")
    window.wait_for_text("Sign-in")
    for field, text in (("login", name), ("password", "x")):
        window.attempt(f"document.querySelector('[name={field}]').value = '{text}'")
    window.press("Sign-in")
    window.press("Continue")


def test_a_person_signs_in_and_out_at_a_real_provider(
    service: Service, window: Browser, issuer: str
) -> None:
    job = service.job()
    sign_in(window, "ann", f"/console/jobs/{job}")
    window.wait_for_text("signed in by OpenID Connect")
    assert window.address == f"{HOME}/console/jobs/{job}"
    assert "Ann Weber" in window.text
    # The rights of the group, no others.
    window.wait_for_text("Cancel job")
    window.open(f"{HOME}/console/models", shows="tuneship-tiny")
    with service.database.read() as connection:
        [row] = [one for one in audit.rows_of(connection) if one["action"] == "sign_in"]
        assert row["person"] == {"issuer": issuer, "subject": "ann", "name": "Ann Weber"}
    window.picture("signed in")
    window.press("Sign out")
    window.press("Yes, sign me out")
    window.wait_for_text("With the account of your organization")
    assert window.address.startswith(f"{HOME}/console/sign-in")
    window.picture("signed out")
    # The provider asks again, too.
    sign_in(window, "ann")
    window.wait_for_text("signed in by OpenID Connect")
    service.clock.ahead = timedelta(minutes=16)
    window.wait_for_text("With the account of your organization")


def test_a_person_of_no_group_is_refused(service: Service, window: Browser) -> None:
    sign_in(window, "eve")
    window.wait_for_text("None of your groups may use this service")
    window.picture("refused")
    window.open(f"{HOME}/console", shows="Sign in")
