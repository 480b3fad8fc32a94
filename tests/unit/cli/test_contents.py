"""The list of commands says what the commands say of themselves, and loads none of them."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tuneship.cli.contents import CONTENTS
from tuneship.cli.main import app


def test_each_command_is_listed_with_its_own_sentence() -> None:
    root: Any = get_command(app)
    listed = {name: text for sentences in CONTENTS.values() for name, text in sentences.items()}
    own = {name: root.get_command(None, name).help for name in root.list_commands(None)}
    assert listed == {
        name: " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())
        for name, text in own.items()
    }


def test_the_list_loads_no_declaration() -> None:
    program = (
        "import sys\nfrom tuneship.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True
    )
    assert "instance-types" in done.stdout
    loaded = done.stdout.splitlines()[-1].split()
    assert "tuneship.cli.contents" in loaded
    assert not {"pydantic", "httpx", "tuneship.contract.resources"} & {*loaded}


def test_a_narrow_terminal_shows_the_options_of_serve_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    assert "--allow-fault-injection" in shown
    assert "--accept-clock" in shown
    assert max(map(len, shown.splitlines())) <= 80
