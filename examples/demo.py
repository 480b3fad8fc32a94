"""Runs three releases of a real model on one machine: a good one, one with bad data, one with bad behaviour.

Each act is one run of `python flows/tune_and_deploy.py`, as a user would start it, against a service and a Prefect
server that this program starts and stops. All files are in one folder, `.demo`, which is emptied at the start.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.script.local_processes import embedded_service, prefect_server
from flows.shared.signals import Stopped, stop_once
from tuneship.client import Client
from tuneship.settings import ClientSettings, PipelineSettings, embedded_service_environment

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "icd10cm"
ENDPOINT = "icd10-chapters"
TRAINING: dict[str, Any] = {
    "hyperparameters": {"learning_rate": 0.001, "batch_size": 16, "epochs": 2, "warmup_steps": 20},
    "validation_frequency": 0.25,
}
CANARY: dict[str, Any] = {
    "steps": [10, 25, 50, 100],
    "interval": "1s",
    "look_every_seconds": 1,
    "min_looks_per_step": 5,
    "min_requests_per_step": 30,
    # With the three looks at 100 % that follow, a quarter of a minute.
    "bake_looks": 12,
    "lease_seconds": 30,
    # Wide limits, since a machine with other work stalls now and then; they still catch a model that is several times
    # slower. Latency counts per token, since the base model's answers have another length.
    "latency_gates": {
        "slow": {"ratio": 3.0, "harm": 0.3, "ok": 0.35},
        "very_slow": {"ratio": 4.0, "harm": 0.15, "ok": 0.2},
        "per_output_token": True,
    },
    "traffic": {
        "prompts": str(DATA / "validation.jsonl"),
        "requests_per_second": 40,
        "max_in_flight": 16,
        "max_tokens": 48,
    },
}
VALIDATION = str(DATA / "validation.jsonl")
EVALUATION = {"evaluation": {"max_rows": 300, "max_tokens": 32}}
COMMON: dict[str, Any] = {"model_name": ENDPOINT, "endpoint": {"name": ENDPOINT}}
EXIT_CODES = {"promoted": 0, "rejected": 3, "rolled_back": 4}


@dataclass(frozen=True)
class Choices:
    """Options: the maximum of training rows, and whether the machine is too busy for latency gates."""

    max_rows: int | None = None
    is_busy: bool = False


@dataclass(frozen=True)
class Demo:
    """The running demo: its folder, its service, the environment of its runs."""

    folder: Path
    settings: ClientSettings
    environment: Mapping[str, str]
    choices: Choices

    def rows(self, name: str) -> str:
        """A data file, or its first rows."""
        file = DATA / f"{name}.jsonl"
        if self.choices.max_rows is None:
            return str(file)
        cut = self.folder / file.name
        cut.write_text("".join(file.read_text().splitlines(keepends=True)[: self.choices.max_rows]))
        return str(cut)

    def act(self, title: str, name: str, release: Mapping[str, Any]) -> dict[str, Any]:
        """Run the flow with a params file of its own; returns its result."""
        say(f"\n{title}")
        params, result = self.folder / f"{name}.json", self.folder / f"{name}-result.json"
        canary = CANARY | ({"latency_gates": None} if self.choices.is_busy else {})
        chosen = COMMON | {"canary": canary} | dict(release)
        params.write_text(json.dumps(chosen, indent=2) + "\n")
        flow = [sys.executable, str(ROOT / "flows" / "tune_and_deploy.py")]
        say(f"$ python flows/tune_and_deploy.py --params {shown(params)} --result {shown(result)}")
        started = time.monotonic()
        code = self._run([*flow, "--params", str(params), "--result", str(result)])
        outcome: dict[str, Any] = json.loads(result.read_text()) if result.is_file() else {}
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

    def serving(self) -> dict[str, int]:
        """The endpoint's split, as the service reports it."""
        with Client(self.settings) as client:
            endpoint = client.canary_endpoints.list(name=ENDPOINT).canary_endpoints[0]
        return {member.id: member.traffic_percentage for member in endpoint.deployments}


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


def main() -> int:
    """Run the three acts; 0 when each ended as it should."""
    parser = argparse.ArgumentParser(description="Three releases of a real model on one machine.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="emptied at the start")
    parser.add_argument(
        "--busy", action="store_true", help="other programs use this machine: no latency gates"
    )
    parser.add_argument("--rows", type=int, help="train on the first so many rows of each file")
    chosen = parser.parse_args()
    folder = chosen.folder.resolve()
    started = time.monotonic()
    memory = Memory()
    memory.start()
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "reports").mkdir(parents=True)
    acts, failures = run_acts(folder, Choices(chosen.rows, chosen.busy))
    say("\n== Summary")
    for name, act in acts.items():
        why = "" if act["reason"] == "none" else f" ({act['reason']})"
        say(f"{name}: {act['outcome']}{why}, {act['seconds']:.0f} s")
        say(f"   report: {shown(Path(act.get('report') or folder))}")
    say(f"{time.monotonic() - started:.0f} s, peak memory {memory.peak_kib / 1024:.0f} MiB\n")
    say("See the service and the Prefect UI again:")
    tools = Path(sys.executable).parent
    say(f"  {shown(tools / 'tuneship')} serve --data-dir {shown(folder / 'data')}")
    say(f"  PREFECT_HOME={folder / 'prefect'} {shown(tools / 'prefect')} server start")
    for failure in failures:
        say(f"FAILED: {failure}")
    return 1 if failures else 0


def run_acts(folder: Path, choices: Choices) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Start the service and the Prefect server, run the acts, stop both; returns results and failures."""
    surroundings = embedded_service_environment().items()
    own = {
        **{name: value for name, value in surroundings if not name.startswith("PREFECT_")},
        "PREFECT_HOME": str(folder / "prefect"),
        "TUNESHIP_ALLOW_FAULT_INJECTION": "true",
        "TUNESHIP_GENERATE_REQUESTS_PER_MINUTE": "6000",
        "TUNESHIP_RECORDS": str(folder / "records"),
        "TUNESHIP_REPORTS": str(folder / "reports"),
    }
    with ExitStack() as companions:
        say("starting the service and the Prefect server")
        service = embedded_service(PipelineSettings(data_dir=folder / "data"), own)
        settings = companions.enter_context(service)
        prefect_url = companions.enter_context(prefect_server(own, folder / "prefect.log"))
        say(f"service {settings.url}, Prefect UI {prefect_url.removesuffix('/api')}")
        own |= {
            "PREFECT_API_URL": prefect_url,
            "TUNESHIP_URL": settings.url,
            "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
            "TUNESHIP_CLIENT_ID": settings.client_id,
        }
        return play(Demo(folder, settings, own, choices))


def play(demo: Demo) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run the three acts; returns their results and every expectation that was not met."""
    acts: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    for name, act in (("act 1", good_release), ("act 2", bad_data), ("act 3", bad_behaviour)):
        acts[name], unmet = act(demo, acts)
        failures += [f"{name}: {expectation}" for expectation in unmet]
        if failures:
            break  # each act builds on the one before
    return acts, failures


Acts = Mapping[str, Mapping[str, Any]]


def good_release(demo: Demo, _: Acts) -> tuple[dict[str, Any], list[str]]:
    """Merge the rows of two hospitals, tune a model on them and promote it over the base model."""
    files = [demo.rows("hospital_a"), demo.rows("hospital_b")]
    release = demo.act(
        "== Act 1: a release. Two hospitals' diagnoses tune the base model",
        "act1",
        TRAINING | {"data": {"files": files, "validation_file": VALIDATION}} | EVALUATION,
    )
    unmet = unexpected_outcome(release, "promoted", "none")
    if not unmet:
        accuracy = release["accuracy"]
        shares = [100 * accuracy[when] / accuracy["rows"] for when in ("before", "after")]
        say(
            f"exact chapter titles on {accuracy['rows']} diagnoses of unseen categories:"
            f" {shares[0]:.1f} % before, {shares[1]:.1f} % after"
        )
    return release, unmet


def bad_data(demo: Demo, _: Acts) -> tuple[dict[str, Any], list[str]]:
    """Train on shuffled answers, which the training gate refuses by comparing with the champion."""
    data = {"files": [demo.rows("mislabelled")], "validation_file": VALIDATION}
    once = {"hyperparameters": TRAINING["hyperparameters"] | {"epochs": 1}}
    refused = demo.act(
        "== Act 2: bad data. The same flow on rows with shuffled answers",
        "act2",
        TRAINING | once | {"data": data},
    )
    for note in refused.get("notes", []):
        say(note)
    unmet = unexpected_outcome(refused, "rejected", "training_gate")
    if refused.get("candidate_deployment_id") is not None:
        unmet.append("a deployment was created")
    return refused, unmet


def bad_behaviour(demo: Demo, acts: Acts) -> tuple[dict[str, Any], list[str]]:
    """Release the promoted model again with faults: the canary rolls back and deletes the deployment."""
    champion = acts["act 1"]["candidate_deployment_id"]
    faulty = {"model": acts["act 1"]["model"], "deployment": {"tags": {"fault.error_rate": "0.2"}}}
    returned = demo.act(
        "== Act 3: bad behaviour. The model of act 1 once more, with every fifth answer an error",
        "act3",
        faulty,
    )
    unmet = unexpected_outcome(returned, "rolled_back", "error_rate")
    if not returned.get("candidate_deleted"):
        unmet.append("the candidate's deployment was not deleted")
    if demo.serving().get(champion) != 100:
        unmet.append("the endpoint does not serve the champion")
    return returned, unmet


def unexpected_outcome(act: Mapping[str, Any], outcome: str, reason: str) -> list[str]:
    """The difference when an act did not end as expected; empty when it did."""
    wanted = (outcome, reason, EXIT_CODES[outcome])
    got = (act.get("outcome"), act.get("reason"), act["exit_code"])
    return [] if got == wanted else [f"{got} instead of {wanted}"]


def say(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def shown(path: Path) -> str:
    """A path relative to the current directory, where it is below it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    stop_once(say)
    try:
        sys.exit(main())
    except Stopped as stopped:
        say("stopped; nothing is left running")
        sys.exit(stopped.exit_code)
