"""`tuneship --version` names the installed distribution's version."""

from importlib.metadata import version

from typer.testing import CliRunner

from tuneship.cli.main import app


def test_the_version_is_that_of_the_installed_command() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tuneship {version('tuneship-client')}\n")
