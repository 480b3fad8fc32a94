"""What the demos share: a service and a Prefect server in one folder, and runs of the flow against them."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flows.script.local_processes import closed_server, embedded_service, prefect_server
from tuneship.cli.live import Picture, in_minutes, shows_pictures
from tuneship.client import Client
from tuneship.host.durable import write_private
from tuneship.settings import (
    ClientSettings,
    PipelineSettings,
    embedded_service_environment,
    service_variables,
)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "icd10cm"
VALIDATION = str(DATA / "validation.jsonl")
# In every folder of a demo: no other one is emptied.
MARK = "emptied-by-the-demo"
# In every folder, too: what the Prefect UI asks for.
AUTH_FILE = "prefect-password"
# Of fewer rows the evaluation, which needs 300 examples, could not prove what the acts are to show.
FEWEST_ROWS = 400
EXIT_CODES = {"promoted": 0, "rejected": 3, "rolled_back": 4}

# For act 3, and for two sides that answer at once.
SERVICE_SETTINGS = {
    "TUNESHIP_ALLOW_FAULT_INJECTION": "true",
    "TUNESHIP_GENERATE_REQUESTS_PER_MINUTE": "6000",
}

# What the flow writes with `--result`, with the exit code and the seconds that it took.
Result = dict[str, Any]


@dataclass(frozen=True)
class DemoRun:
    """A running demo: its folder, its service, and the environment of its flows."""

    folder: Path
    settings: ClientSettings
    environment: Mapping[str, str]
    # Whether the flows write lines on a terminal, too.
    is_plain: bool = False

    def release(self, title: str, name: str, parameters: Mapping[str, Any]) -> Result:
        """Run the flow with a params file of its own; returns its result."""
        say(f"\n{title}")
        params, result = self.folder / f"{name}.json", self.folder / f"{name}-result.json"
        params.write_text(json.dumps(parameters, indent=2) + "\n")
        flow = [sys.executable, str(ROOT / "flows" / "tune_and_deploy.py")]
        say(f"$ python flows/tune_and_deploy.py --params {shown(params)} --result {shown(result)}")
        started = time.monotonic()
        plain = ["--plain"] if self.is_plain else []
        code = self._run([*flow, "--params", str(params), "--result", str(result), *plain])
        outcome: Result = json.loads(result.read_text()) if result.is_file() else {}
        return outcome | {"exit_code": code, "seconds": time.monotonic() - started}

    def _run(self, command: list[str]) -> int:
        # In a session of its own, so that Ctrl-C reaches the demo alone, which then lets the flow clean up.
        flow = subprocess.Popen(command, env=dict(self.environment), start_new_session=True)
        try:
            return flow.wait()
        except BaseException:
            flow.terminate()
            flow.wait()
            raise

    def split(self, endpoint: str) -> dict[str, int]:
        """The traffic split of an endpoint, as the service reports it."""
        with Client(self.settings) as client:
            found = client.canary_endpoints.list(name=endpoint).canary_endpoints[0]
        return {member.id: member.traffic_percentage for member in found.deployments}

    def rows(self, name: str, most: int | None) -> str:
        """A data file of `examples/icd10cm`, or its first rows."""
        file = DATA / f"{name}.jsonl"
        if most is None:
            return str(file)
        cut = self.folder / file.name
        cut.write_text("".join(file.read_text().splitlines(keepends=True)[:most]))
        return str(cut)


def number_of_rows(text: str) -> int:
    """Return the value of `--rows`; raises argparse's error below `FEWEST_ROWS`."""
    if not text.isdecimal() or int(text) < FEWEST_ROWS:
        raise argparse.ArgumentTypeError(f"must be a whole number, {FEWEST_ROWS} or more")
    return int(text)


@contextmanager
def running(
    folder: Path, variables: Mapping[str, str] | None = None, *, is_plain: bool = False
) -> Generator[DemoRun]:
    """Start the service and the Prefect server in a folder, and stop both at the end.

    `variables`: settings of the service beside those of all demos.
    """
    data = PipelineSettings(data_dir=folder / "data")
    environment = {**environment_in(folder), **SERVICE_SETTINGS, **(variables or {})}
    with ExitStack() as started:
        with waiting("starting the service"):
            settings = started.enter_context(embedded_service(data, environment))
        run = started.enter_context(beside_prefect(folder, settings, is_plain=is_plain))
        with Client(settings) as client:
            # It signs in to the page where the releases of all acts appear.
            link = client.sign_in_links.create().url.replace("#", "?next=/console/releases#")
        say(f"watch it in the browser (works once, for 10 minutes, on this machine): {link}")
        yield run


def environment_in(folder: Path) -> dict[str, str]:
    """The surroundings' environment, where a demo's folder keeps what Prefect and the flows write."""
    surroundings = embedded_service_environment().items()
    return {
        **{name: value for name, value in surroundings if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "prefect"),
        "TUNESHIP_RECORDS": str(folder / "records"),
        "TUNESHIP_REPORTS": str(folder / "reports"),
    }


@contextmanager
def beside_prefect(
    folder: Path, settings: ClientSettings, *, is_plain: bool = False
) -> Generator[DemoRun]:
    """Start a Prefect server for runs against a service, and stop it at the end."""
    own = environment_in(folder)
    with ExitStack() as started:
        with waiting("starting the Prefect server"):
            variables = started.enter_context(prefect_server(own, folder / "prefect.log"))
        write_private(folder / AUTH_FILE, variables["PREFECT_API_AUTH_STRING"] + "\n")
        say(
            f"service {settings.url}, Prefect UI {variables['PREFECT_API_URL'].removesuffix('/api')}"
        )
        say(f"sign in to the UI with the line in {shown(folder / AUTH_FILE)}")
        everything = own | service_variables(settings) | variables
        yield DemoRun(folder, settings, everything, is_plain)


@contextmanager
def waiting(what: str) -> Generator[None]:
    """Say what is waited for; a terminal also counts the seconds."""
    console = Console()
    if not shows_pictures(console):
        say(what)
        yield
        return
    started = time.monotonic()
    with Picture(console, lambda: Text(f"{what}: {in_minutes(time.monotonic() - started)}")):
        yield


class Memory(threading.Thread):
    """Samples the resident memory of this process and all its descendants, where the system has /proc."""

    def __init__(self) -> None:
        """Create the sampler; `start` begins to sample."""
        super().__init__(daemon=True)
        self.peak_kib = 0

    def run(self) -> None:
        """Sample every half second until the program ends."""
        while Path("/proc/self/stat").exists():
            self.peak_kib = max(self.peak_kib, self._now())
            time.sleep(0.5)

    @staticmethod
    def _now() -> int:
        parents: dict[int, int] = {}
        resident: dict[int, int] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the process has just ended
            parents[int(folder.name)] = int(fields[1])
            resident[int(folder.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 1024
        family = {os.getpid()}
        # Each pass adds one more generation of children.
        for _ in range(8):
            family |= {pid for pid, parent in parents.items() if parent in family}
        return sum(resident.get(pid, 0) for pid in family)


def emptied(folder: Path) -> Path:
    """Make a folder of a demo, without what an earlier one has left. Ends the program at a folder of other things."""
    mark = folder / MARK
    if folder.exists() and any(folder.iterdir()) and not mark.is_file():
        sys.exit(f"{folder} holds other things than a demo's, and would be emptied")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "reports").mkdir(parents=True)
    mark.touch()
    return folder


def unexpected_outcome(result: Result, outcome: str, reason: str) -> list[str]:
    """The difference when a release did not end as expected; empty when it did."""
    wanted = (outcome, reason, EXIT_CODES[outcome])
    got = (result.get("outcome"), result.get("reason"), result["exit_code"])
    return [] if got == wanted else [f"{got} instead of {wanted}"]


def exact_matches(result: Result) -> tuple[float, float]:
    """Percent of the examples that were answered exactly, before and after the tuning."""
    if (accuracy := result["accuracy"]) is not None:
        before, after = (100 * accuracy[when] / accuracy["rows"] for when in ("before", "after"))
        return before, after
    grader = result["evaluation"]["graders"][0]
    return 100 * grader["baseline"]["score"], 100 * grader["candidate"]["score"]


def summary(results: Mapping[str, Result], folder: Path, seconds: float, memory: Memory) -> None:
    """Print how each release ended, where its report is, and how to look again."""
    say("\n== Summary")
    for name, result in results.items():
        why = "" if result.get("reason", "none") == "none" else f" ({result['reason']})"
        say(f"{name}: {result.get('outcome', 'no result')}{why}, {result['seconds']:.0f} s")
        say(f"   report: {shown(Path(result.get('report') or folder))}")
    say(f"{seconds:.0f} s, peak memory {memory.peak_kib / 1024:.0f} MiB\n")
    say("See the service and the Prefect UI again, each in a terminal of its own:")
    python = shown(Path(sys.executable))
    if (folder / "data").exists():  # else it was a cluster
        say(f"  {python} -m tuneship.cli.main serve --data-dir {shown(folder / 'data')}")
    page = "http://127.0.0.1:4200"
    kept = closed_server(f"{page}/api", f'"$(cat {shown(folder / AUTH_FILE)})"')
    variables = {"PREFECT_HOME": str(folder / "prefect")} | kept
    # Those that only make a script's runs faster are left out.
    values = " ".join(
        f"{name}={value}" for name, value in variables.items() if "_SERVICES_" not in name
    )
    program = "uvicorn --factory flows.script.prefect_server:for_this_machine"
    say(f"  {values} {python} -m {program} --port 4200   # {page}")


def say(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def shown(path: Path) -> str:
    """A path relative to the current directory, where it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
