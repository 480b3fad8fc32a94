"""Both wheels, built from the sources: what they hold, and the README's commands in environments with nothing else."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.package_index import need_package_index
from tests.support.service.service_fixtures import start
from tests.support.waiting import free_port

__all__ = ["start"]

pytestmark = [pytest.mark.slow, pytest.mark.long]

ROOT = Path(__file__).parents[2]
PROJECT = "tuneship/project/"
# What pip says where no index answers.


def run(command: list[str | Path], **options: Any) -> str:
    """Run a command and return its output; it must succeed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both wheels, by the name of their distribution."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run([*build, "--wheel-dir", folder, "./packaging/client", "."], cwd=ROOT)
    return {file.name.partition("-")[0]: file for file in folder.glob("*.whl")}


@pytest.fixture(scope="session")
def contents(wheels: dict[str, Path]) -> dict[str, set[str]]:
    """The names of the files in each wheel, without those about the wheel itself."""
    found: dict[str, set[str]] = {}
    for name, wheel in wheels.items():
        with zipfile.ZipFile(wheel) as archive:
            files = set(archive.namelist())
        found[name] = {file for file in files if ".dist-info/" not in file}
    return found


def metadata(wheel: Path, name: str = "METADATA") -> str:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (one for one in archive.namelist() if one.endswith(f".dist-info/{name}"))
        return archive.read(file).decode()


def test_only_one_name_stands_at_the_top_and_no_file_is_in_both(
    contents: dict[str, set[str]],
) -> None:
    client, whole = contents["tuneship_client"], contents["tuneship"]
    assert {file.partition("/")[0] for file in client | whole} == {"tuneship"}
    assert client & whole == set()
    listed = run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "tuneship"], cwd=ROOT
    )
    assert client | {one for one in whole if not one.startswith(PROJECT)} == set(listed.split())


def test_the_project_in_the_wheel_is_what_the_repository_has(contents: dict[str, set[str]]) -> None:
    rooms = ("flows", "tasks", "deployments", "prefect.yaml")
    listed = run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *rooms], cwd=ROOT
    )
    shipped = {one.removeprefix(PROJECT) for one in contents["tuneship"] if one.startswith(PROJECT)}
    examples = {one for one in shipped if one.startswith("examples/")}
    assert shipped - examples == {*listed.split(), "README.md"}
    release: Any = yaml.safe_load((ROOT / "examples" / "release.yaml").read_text())
    data = [*release["data"]["files"], release["data"]["validation_file"]]
    assert {f"examples/{file}" for file in (*data, "quickstart.ipynb")} <= examples


def test_the_metadata_name_licence_types_and_the_command_once(wheels: dict[str, Path]) -> None:
    headers: dict[str, Message] = {
        name: Parser().parsestr(metadata(wheel)) for name, wheel in wheels.items()
    }
    for name, wheel in wheels.items():
        assert headers[name]["License-Expression"] == "Apache-2.0"
        assert headers[name].get_all("License-File") == ["LICENSE"]
        assert "Typing :: Typed" in headers[name].get_all("Classifier", [])
        assert metadata(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    version = headers["tuneship"]["Version"]
    required = headers["tuneship"].get_all("Requires-Dist", [])
    assert f"tuneship-client[cli]=={version}" in required
    assert "tuneship = tuneship.cli.entry:main" in metadata(
        wheels["tuneship_client"], "entry_points.txt"
    )
    declared = metadata(wheels["tuneship"], "entry_points.txt").split("\n")
    assert declared == ["[prefect.collections]", "tuneship = tuneship.prefect", ""]


def test_a_checker_of_wheels_finds_nothing(wheels: dict[str, Path]) -> None:
    check = [sys.executable, "-m", "check_wheel_contents"]
    # W004: migrations begin with numbers, and a project is data. W002: some of its files are empty.
    run([*check, "--ignore", "W002,W004", *wheels.values()], cwd=wheels["tuneship"].parent)


class Installed:
    """An environment of its own, and a home folder."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "bin" / "python"
        self.home = folder / "home"
        venv.create(folder, symlinks=True)
        self.home.mkdir()
        self.environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "TUNESHIP_PRELOAD_TRAINING": "false",
        }

    def pip(self, *arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run this environment's pip, which is the tests' own."""
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)

    def attempt(
        self, program: str, *arguments: str, cwd: Path | None = None, **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program of this environment."""
        return subprocess.run(
            [self.python.with_name(program), *arguments],
            cwd=cwd or self.home,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """Run a program of this environment and return its output; it must succeed."""
        done = self.attempt(*command, cwd=cwd, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def packages(self) -> set[str]:
        """The distributions that are installed."""
        listed: list[dict[str, str]] = json.loads(self.pip("list", "--format", "json").stdout)
        return {one["name"] for one in listed}


@pytest.fixture(scope="session")
def whole(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Both wheels; what they depend on is borrowed from the environment of the tests, without its checkout."""
    made = Installed(tmp_path_factory.mktemp("whole"))
    done = made.pip("install", "--no-deps", "--no-index", *wheels.values())
    assert done.returncode == 0, done.stderr
    # Not by a file in its site-packages: workers may read what PYTHONPATH names, and nothing else outside.
    made.environment["PYTHONPATH"] = sysconfig.get_path("purelib")
    return made


@pytest.fixture(scope="session")
def shop(whole: Installed) -> Path:
    """A project that `tuneship init` has written."""
    said = whole.run("tuneship", "init", "shop")
    assert "next: shop/README.md" in said
    return whole.home / "shop"


def commands(file: Path) -> list[str]:
    """The lines of the first block of commands in a document, without comments."""
    block = file.read_text().partition("```sh\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def test_nothing_but_tuneship_can_be_imported(whole: Installed) -> None:
    program = (
        "from importlib.util import find_spec\n"
        "import tuneship\n"
        "print(tuneship.__file__, [one for one in ('flows', 'tasks', 'deployments') if find_spec(one)])"
    )
    file, found = whole.run("python", "-c", program).split(maxsplit=1)
    assert Path(file).is_relative_to(whole.python.parents[1])
    assert found.strip() == "[]"


def test_prefect_finds_the_collection_which_loads_neither_service_nor_torch(
    whole: Installed,
) -> None:
    program = (
        "import sys\n"
        "from prefect.plugins import load_prefect_collections\n"
        "from prefect.utilities.dispatch import lookup_type\n"
        "from prefect.blocks.core import Block\n"
        "found = load_prefect_collections()['tuneship']\n"
        "assert lookup_type(Block, 'tuneship-credentials') is found.TuneshipCredentials\n"
        "from tuneship.prefect.tasks import create_job\n"
        "from tuneship.prefect.waits import wait_for_job\n"
        "print(found.__name__, create_job.name, wait_for_job.name)\n"
        "heavy = {'torch', 'transformers', 'tuneship.service', 'mlflow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    # The wheel's own entry points go before those of the checkout in the environment that is borrowed from.
    own = sysconfig.get_path("purelib", vars={"base": str(whole.python.parents[1])})
    path = os.pathsep.join([own, whole.environment["PYTHONPATH"]])
    said = whole.run("python", "-c", program, PYTHONPATH=path)
    assert said.split() == ["tuneship.prefect", "create_job", "wait_for_job"]


def test_a_second_init_is_refused(whole: Installed, shop: Path) -> None:
    before = {file: file.read_bytes() for file in shop.rglob("*") if file.is_file()}
    done = whole.attempt("tuneship", "init", "shop")
    assert done.returncode == 1
    assert done.stderr == "tuneship: shop: there is already README.md; name a folder without it\n"
    assert {file: file.read_bytes() for file in shop.rglob("*") if file.is_file()} == before


@pytest.mark.soak
def test_the_first_command_of_the_project_releases_a_model(whole: Installed, shop: Path) -> None:
    release, _, _ = commands(shop / "README.md")
    assert release.startswith("python flows/tune_and_deploy.py --params examples/release.yaml")
    assert release in (ROOT / "docs" / "installation.md").read_text()
    parameters = shop / "examples" / "release.yaml"
    # The files are the user's own now: less to train on, and no limits on latency where a machine is busy with tests.
    chosen: Any = yaml.safe_load(parameters.read_text())
    chosen["canary"] |= {"latency_gates": None, "steps": [50, 100], "bake_looks": 3}
    chosen["evaluation"]["max_examples"] = 20
    parameters.write_text(yaml.safe_dump(chosen))
    for file in chosen["data"]["files"]:
        lines = (parameters.parent / file).read_text().splitlines(keepends=True)
        (parameters.parent / file).write_text("".join(lines[:400]))
    whole.run(*release.split(), cwd=shop)
    assert json.loads((shop / "out.json").read_text())["outcome"] == "promoted"


@pytest.fixture
def up(whole: Installed, shop: Path) -> Iterator[str]:
    """`python -m deployments.local up` in the project; yields the address of the Prefect server's API."""
    ports = {
        f"TUNESHIP_{name}": str(free_port()) for name in ("PORT", "PREFECT_PORT", "BRIDGE_PORT")
    }
    _, start_all, end_all = commands(shop / "README.md")
    try:
        whole.run(*start_all.split(), cwd=shop, **ports)
        yield f"http://127.0.0.1:{ports['TUNESHIP_PREFECT_PORT']}/api"
    finally:
        whole.run(*end_all.split(), cwd=shop, **ports)


def test_a_worker_finds_the_flows_of_the_project(whole: Installed, up: str) -> None:
    home = whole.home / ".tuneship"
    own = {
        "PREFECT_API_URL": up,
        "PREFECT_API_AUTH_STRING": (home / "run" / "prefect-password").read_text().strip(),
        "PREFECT_HOME": str(home / "prefect"),
    }
    # From elsewhere, so that only the worker's own path leads to the flows.
    said = whole.run(
        "python", "-m", "prefect", "deployment", "run", "guard/guard", "--watch", **own
    )
    assert "Completed" in said
    said = whole.run(
        "python", "-m", "prefect", "block", "register", "--module", "tuneship.prefect", **own
    )
    assert "Tuneship credentials" in said


@pytest.fixture(scope="session")
def light(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The client alone, with its dependencies from the index."""
    return from_the_index(tmp_path_factory.mktemp("light"), str(wheels["tuneship_client"]))


@pytest.fixture(scope="session")
def command(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The client with the command line, and its dependencies from the index."""
    wheel = f"tuneship-client[cli] @ {wheels['tuneship_client'].as_uri()}"
    return from_the_index(tmp_path_factory.mktemp("command"), wheel)


def from_the_index(folder: Path, wheel: str) -> Installed:
    """Install a wheel with all that it needs, in the tested versions."""
    need_package_index()
    made = Installed(folder)
    done = made.pip("install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize(
    ("distribution", "use", "name"),
    [
        ("tuneship-client", "a program that calls a service", "light"),
        ("tuneship-client[cli]", "the same, with the command `tuneship`", "command"),
    ],
)
def test_the_client_is_as_small_as_the_documents_say(
    distribution: str, use: str, name: str, request: pytest.FixtureRequest
) -> None:
    environment: Installed = request.getfixturevalue(name)
    installed = environment.packages()
    documented = (ROOT / "docs" / "installation.md").read_text()
    assert f"| `{distribution}` | {use} | {len(installed)} |" in documented
    lock = {"light": "client", "command": "command"}[name]
    locked = (ROOT / "packaging" / "locked" / f"{lock}.txt").read_text()
    names = set(re.findall(r"^([a-z0-9_-]+)==\S+ \\", locked, flags=re.MULTILINE))
    assert {one.replace("_", "-").lower() for one in installed} == names | {"tuneship-client"}


def test_the_client_calls_a_service(light: Installed, start: Any) -> None:
    service = start()
    service.listen()
    program = (
        "from tuneship.client import Client\n"
        "from tuneship.settings import ClientSettings\n"
        "with Client(ClientSettings()) as client:\n"
        "    print([model.id for model in client.models.list().models])"
    )
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    own = {"URL": service.url, "API_KEY": key, "CLIENT_ID": "alice"}
    variables = {f"TUNESHIP_{name}": value for name, value in own.items()}
    said = light.run("python", "-c", program, **variables)
    assert "tuneship-tiny" in said


def test_the_command_without_its_libraries_says_what_to_install(light: Installed) -> None:
    done = light.attempt("tuneship", "openapi")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "tuneship: the command needs `pip install 'tuneship-client[cli]'` (missing: "
    )


def test_the_command_of_the_client_needs_no_service(command: Installed) -> None:
    assert json.loads(command.run("tuneship", "openapi"))["openapi"] == "3.1.0"
    assert "serve" in command.run("tuneship", "--help")


def test_the_command_of_the_client_logs_in(command: Installed, start: Any) -> None:
    service = start()
    service.listen()
    (command.home / "key").write_text(service.headers["alice"]["Authorization"].split()[1])
    command.run("tuneship", "login", service.url, "--client-id", "alice", "--api-key-file", "key")
    assert json.loads(command.run("tuneship", "whoami", "--json"))["url"] == service.url


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("init", "shop"), "this needs `pip install tuneship`: tuneship-client holds no pipeline"),
        (("doctor",), "this needs `pip install tuneship`: tuneship-client knows no machine"),
        (("keys", "list"), "this needs `pip install 'tuneship[service]'` (missing: sqlalchemy)"),
        (("serve",), "the service needs `pip install 'tuneship[service]'` (missing: sqlalchemy)"),
    ],
)
def test_a_missing_extra_of_the_client_says_what_to_install(
    command: Installed, arguments: tuple[str, ...], said: str
) -> None:
    done = command.attempt("tuneship", *arguments)
    assert (done.returncode, done.stderr) == (1, f"tuneship: {said}\n")
