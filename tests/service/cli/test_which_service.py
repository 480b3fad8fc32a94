"""Which service a command talks to: the environment's, the one of `tuneship login`, or that of this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.service.in_process import Service
from tests.support.waiting import free_port
from tuneship.cli.main import app
from tuneship.host.process_start import process_start
from tuneship.service.access.api_keys import write_credentials

NO_SERVICE = {"TUNESHIP_URL": None, "TUNESHIP_API_KEY": None, "TUNESHIP_CLIENT_ID": None}


class Home:
    """A user's configuration folder and data directory, and the command line in this environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.login = folder / "config" / "tuneship" / "login.json"
        self.environment: dict[str, str | None] = {
            **NO_SERVICE,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "TUNESHIP_DATA_DIR": str(self.data_dir),
        }

    def run(self, *words: str, stdin: str | None = None, **environment: str) -> Result:
        chosen = {**self.environment, **environment}
        return CliRunner().invoke(app, list(words), input=stdin, env=chosen)

    def json(self, *words: str) -> Any:
        done = self.run(*words, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def write_local(self, service: Service, process: int, started: int | None = None) -> None:
        """Write what `tuneship serve` leaves in its data directory."""
        self.data_dir.mkdir(exist_ok=True)
        started = process_start(process) if started is None else started
        record = json.dumps({"url": service.url, "pid": process, "started": started})
        (self.data_dir / "service.json").write_text(record)
        file = self.data_dir / "credentials.json"
        write_credentials(service.keys, file, service.url, service.clock())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def served(start: Callable[..., Service]) -> Service:
    service = start()
    service.listen()
    return service


def key_of(service: Service) -> str:
    return service.headers["alice"]["Authorization"].removeprefix("Bearer ")


def ended_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_service_of_this_machine_needs_no_setting(home: Home, served: Service) -> None:
    home.write_local(served, os.getpid())
    assert home.json("instance-types", "list")["instance_types"]
    who = home.json("whoami")
    assert (who["url"], who["client_id"]) == (served.url, "local")
    assert who["named_by"] == f"the service of {home.data_dir}"
    kept = json.loads((home.data_dir / "credentials.json").read_text())
    assert who["key_id"] == kept["api_key"][4:12]
    assert kept["api_key"][13:] not in home.run("whoami").output


def test_a_service_that_has_ended_is_sent_no_key(home: Home, served: Service) -> None:
    """Another program may listen at its address by now, and another process may have its id."""
    before = len(served.log.texts)
    for process, started in ((ended_process(), 7), (1, 7), (os.getpid(), 7)):
        home.write_local(served, process, started)
        done = home.run("jobs", "list")
        assert done.exit_code == 1
        assert f"no service runs on {home.data_dir}: the last one, at {served.url}, has ended" in (
            done.stderr
        )
    assert served.log.texts[before:] == []


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("service.json", None, "no service is known: start one with `tuneship serve`"),
        ("credentials.json", None, "no service is known"),
        ("service.json", "{", "no service is known"),
        ("credentials.json", "{", "credentials.json is damaged"),
        ("credentials.json", "{}", "credentials.json is damaged"),
        ("credentials.json", "[]", "credentials.json is damaged"),
    ],
)
def test_a_damaged_data_directory_is_reported(
    home: Home, served: Service, file: str, content: str | None, says: str
) -> None:
    home.write_local(served, os.getpid())
    if content is None:
        (home.data_dir / file).unlink()
    else:
        (home.data_dir / file).write_text(content)
    done = home.run("jobs", "list")
    assert (done.exit_code, done.stdout) == (1, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_environment_goes_first_and_must_be_whole(home: Home, served: Service) -> None:
    done = home.run("jobs", "list", TUNESHIP_URL=served.url)
    assert done.exit_code == 1
    assert "TUNESHIP_API_KEY and TUNESHIP_CLIENT_ID must be set too" in done.stderr
    whole = {"TUNESHIP_API_KEY": key_of(served), "TUNESHIP_CLIENT_ID": "alice"}
    assert home.run("jobs", "list", TUNESHIP_URL=served.url, **whole).exit_code == 0
    nobody = f"http://127.0.0.1:{free_port()}"
    done = home.run("jobs", "list", TUNESHIP_URL=nobody, **whole)
    assert done.exit_code == 1
    host = nobody.removeprefix("http://")
    assert f"does a service run at {host} (named by the environment)?" in done.stderr
    done = home.run("jobs", "list", TUNESHIP_URL=served.url, TUNESHIP_TRIES="many", **whole)
    assert "a setting is not valid: TUNESHIP_TRIES" in done.stderr
    missing = home.run("jobs", "list", TUNESHIP_URL=served.url, TUNESHIP_CA_FILE="/no/ca", **whole)
    assert "/no/ca holds no certificates" in missing.stderr


def test_a_login_is_kept_for_its_owner_until_the_logout(home: Home, served: Service) -> None:
    words = ("login", served.url, "--client-id", "alice", "--api-key-file", "-")
    done = home.run(*words, stdin=f"{key_of(served)}\n")
    assert done.exit_code == 0, done.output
    assert home.login.stat().st_mode & 0o777 == 0o600
    assert home.login.parent.stat().st_mode & 0o777 == 0o700
    assert home.json("whoami")["named_by"] == "tuneship login"
    assert home.run("jobs", "list").exit_code == 0
    home.login.chmod(0o644)
    assert "is open to other users" in home.run("jobs", "list").stderr
    home.login.chmod(0o600)
    home.login.write_text("{")
    assert "login.json is damaged" in home.run("jobs", "list").stderr
    assert home.run("logout").exit_code == 0
    assert not home.login.exists()
    assert home.run("logout").stderr == "tuneship: nobody is logged in\n"
    assert "no service is known" in home.run("whoami").stderr


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (("{url}", "--client-id", "alice"), "secret", "refused (401 authentication_error)"),
        (("{url}", "--client-id", "bob"), "{key}", "refused (401 authentication_error)"),
        (("http://127.0.0.1:1", "--client-id", "a"), "{key}", "does a service run at 127.0.0.1:1"),
        (("ftp://x", "--client-id", "a"), "{key}", "URL: must begin with http"),
        (("{url}", "--client-id", "a"), "", "the API key: must be one line"),
        (("{url}", "--client-id", "\xe4"), "{key}", "the client id: must be one line"),
        (("{url}",), "{key}", "--client-id: is needed"),
    ],
)
def test_a_login_that_fails_keeps_nothing(
    home: Home, served: Service, words: tuple[str, ...], key: str, says: str
) -> None:
    named = {"url": served.url, "key": key_of(served)}
    given = [word.format(**named) for word in words]
    done = home.run("login", *given, "--api-key-file", "-", stdin=key.format(**named))
    assert done.exit_code == 1
    assert says in done.stderr
    assert not home.login.exists()
    assert "secret" not in done.output


def complete(home: Home, line: str, **environment: str) -> Result:
    """Complete as bash does at the end of a line."""
    asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    return CliRunner().invoke(
        app,
        env={**home.environment, "_TUNESHIP_COMPLETE": "complete_bash", **asked, **environment},
        prog_name="tuneship",
    )


def test_a_shell_completes_commands_words_and_ids(home: Home, served: Service) -> None:
    home.write_local(served, os.getpid())
    dataset = served.dataset()
    own = {
        "TUNESHIP_URL": served.url,
        "TUNESHIP_API_KEY": key_of(served),
        "TUNESHIP_CLIENT_ID": "alice",
    }
    assert "datasets" in complete(home, "tuneship data").stdout.split()
    assert "--status" in complete(home, "tuneship jobs list --sta").stdout.split()
    assert complete(home, "tuneship jobs list --status comp").stdout.split() == ["completed"]
    assert complete(home, "tuneship datasets get ds", **own).stdout.split() == [dataset]
    assert complete(home, "tuneship jobs create --dataset-id ds", **own).stdout.split() == [dataset]
    models = complete(home, "tuneship jobs create --base-model tune", **own)
    assert models.stdout.split() == ["tuneship-tiny"]


@pytest.mark.parametrize("wrong", ["no service", "nobody answers", "a wrong key"])
def test_a_completion_that_fails_is_silent(home: Home, served: Service, wrong: str) -> None:
    chosen = {
        "no service": {},
        "nobody answers": {
            "TUNESHIP_URL": "http://127.0.0.1:1",
            "TUNESHIP_API_KEY": "k",
            "TUNESHIP_CLIENT_ID": "c",
        },
        "a wrong key": {
            "TUNESHIP_URL": served.url,
            "TUNESHIP_API_KEY": "k",
            "TUNESHIP_CLIENT_ID": "c",
        },
    }[wrong]
    done = complete(home, "tuneship datasets get ds", **chosen)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def loaded_by(*words: str) -> set[str]:
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('LOADED', *sys.modules))\n"
        "from tuneship.cli.main import app\n"
        f"app({list(words)!r}, prog_name='tuneship')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.partition("LOADED ")[2].split())


def test_the_help_starts_quickly_because_it_loads_little() -> None:
    slow = {"httpx", "pydantic_settings", "prefect", "pandas", "sqlalchemy", "starlette", "torch"}
    assert not loaded_by("--help") & {*slow, "yaml"}
    assert not loaded_by("jobs", "create", "--help") & slow
    assert not loaded_by("keys", "--help") & {*slow, "tuneship.contract.jobs"}


def test_the_light_install_has_the_commands_of_the_api(home: Home, served: Service) -> None:
    home.write_local(served, os.getpid())
    program = (
        "import sys\n"
        "for name in ('sqlalchemy', 'starlette', 'uvicorn', 'torch', 'cryptography', 'orjson'):\n"
        "    sys.modules[name] = None\n"
        "from tuneship.cli.main import app\n"
        "app(['models', 'list', '--json'])"
    )
    chosen = {name: value for name, value in home.environment.items() if value is not None}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PATH": os.environ["PATH"], **chosen},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [one["id"] for one in json.loads(done.stdout)["models"]] == ["tuneship-tiny"]
