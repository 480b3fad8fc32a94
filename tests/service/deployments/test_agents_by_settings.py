"""The settings say where replicas run; what is missing or open is refused by its name before anything changes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.fakes.ray_dashboard import TOKEN, PlayedDashboard, ray_dashboard
from tests.support.service.processes import start
from tests.support.waiting import free_port
from tuneship.host.startup import StartupError
from tuneship.service.own_replicas import check_ray
from tuneship.settings import ServiceSettings

URL = "http://127.0.0.1:1"


@pytest.fixture
def dashboard() -> Iterator[PlayedDashboard]:
    with ray_dashboard() as played:
        yield played


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


def ray(tmp_path: Path, token_file: Path | None, *urls: str, **more: Any) -> ServiceSettings:
    return ServiceSettings(
        data_dir=tmp_path / "data", agents="ray", ray_urls=urls, ray_token_file=token_file, **more
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"agents": "ray"}, "ray_urls and ray_token_file"),
        ({"agents": "ray", "ray_urls": (URL,)}, "ray_token_file"),
        ({"agents": "local", "ray_urls": (URL,)}, "need agents=ray"),
        ({"ray_token_file": Path("x")}, "need agents=ray"),
        ({"ray_plaintext": True}, "need agents=ray"),
        ({"agents": "kubernetes"}, "none"),
        ({"agent_ports": "any"}, "agent_ports"),
        ({"agent_cpus": 0}, "agent_cpus"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        ServiceSettings(**fields)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("head:8265", "begin with http"),
        ("ray://head", "begin with http"),
        ("http://head:8265", "ray_plaintext"),
        ("https://user:geheim@head", "addresses only"),
        ("https://head?token=geheim", "addresses only"),
    ],
)
def test_an_address_of_ray_is_one_that_keeps_the_token(
    tmp_path: Path, token_file: Path, url: str, named: str
) -> None:
    with pytest.raises(ValidationError, match=named) as refused:
        ray(tmp_path, token_file, url)
    assert "geheim" not in refused.value.errors()[0]["msg"]


def test_plaintext_can_be_allowed_in_a_private_network(tmp_path: Path, token_file: Path) -> None:
    made = ray(tmp_path, token_file, "http://head:8265", ray_plaintext=True)
    assert made.ray_urls == ("http://head:8265",)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot be read"),
        (b"", "does not hold"),
        (b"a\nb", "does not hold"),
        (b"\xff", "read"),
    ],
)
def test_a_token_file_that_holds_none_is_named(
    tmp_path: Path, content: bytes | None, named: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartupError, match=f"TUNESHIP_RAY_TOKEN_FILE .*{named}"):
        check_ray(ray(tmp_path, file, URL))


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path, token_file: Path) -> None:
    for content in (None, "no certificate"):
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(StartupError, match="TUNESHIP_RAY_CA_FILE"):
            check_ray(ray(tmp_path, token_file, URL, ray_ca_file=file))


def test_a_ray_without_a_token_or_with_another_one_is_refused(
    tmp_path: Path, token_file: Path, dashboard: PlayedDashboard
) -> None:
    settings = ray(tmp_path, token_file, dashboard.url)
    check_ray(settings)
    token_file.write_text("another")
    with pytest.raises(StartupError, match=f"{dashboard.url}: .*TUNESHIP_RAY_TOKEN_FILE"):
        check_ray(settings)
    dashboard.lets_everybody_in = True
    with pytest.raises(StartupError, match="RAY_AUTH_MODE=token"):
        check_ray(settings)


@pytest.mark.slow
def test_a_service_that_is_refused_by_ray_has_changed_nothing(
    tmp_path: Path, token_file: Path, dashboard: PlayedDashboard
) -> None:
    dashboard.lets_everybody_in = True
    data = tmp_path / "data"
    settings = {
        "TUNESHIP_AGENTS": "ray",
        "TUNESHIP_RAY_URLS": dashboard.url,
        "TUNESHIP_RAY_TOKEN_FILE": str(token_file),
    }
    command = ("tuneship.cli.main", "serve", "--port", "0", "--data-dir", str(data))
    with start(*command, env=os.environ | settings, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"agents cannot be started on {dashboard.url}" in said
    assert "RAY_AUTH_MODE=token" in said
    assert [one for one in data.rglob("*") if one.is_file()] == [data / "lock"]


def test_a_service_starts_while_ray_is_away(
    tmp_path: Path, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Deployments, jobs and records need no new replica."""
    check_ray(ray(tmp_path, token_file, f"http://127.0.0.1:{free_port()}"))
    assert "no agent can be started now" in caplog.text
