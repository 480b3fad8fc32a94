"""Runs four releases of a real model on one machine: a good one, bad data, bad behaviour, and worse answers.

Each act is one run of `python flows/tune_and_deploy.py`, as a user would start it, against a service and a Prefect
server that this program starts and stops. All files are in one folder, `.demo`, which is emptied at the start.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_run import (
    DATA,
    FEWEST_ROWS,
    ROOT,
    DemoRun,
    Memory,
    Result,
    emptied,
    exact_matches,
    number_of_rows,
    running,
    say,
    summary,
    unexpected_outcome,
)

from flows.shared.signals import Stopped, stop_once

ENDPOINT = "icd10-chapters"
# So small a model learns with one thread: a second core helps as a second device.
SERVICE_SETTINGS = {"TUNESHIP_TRAINING_DEVICES": str(min(2, os.cpu_count() or 1))}
TRAINING: dict[str, Any] = {
    "hyperparameters": {
        "learning_rate": 0.001,
        "batch_size": 16,
        "epochs": 2,
        "warmup_steps": 20,
        # Two epochs do not overfit so small a model, and without dropout a step is computed faster.
        "lora_dropout": 0,
    },
    "validation_frequency": 0.5,
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
# Exact chapter titles decide: 300 examples prove a margin of five points.
EVALUATION: dict[str, Any] = {
    "graders": [{"name": "chapter", "type": "string_check"}],
    "margin": 0.05,
    "max_examples": 300,
    "max_tokens": 32,
}
# Half of the file: shuffled answers teach nothing more in twice the time.
MISLABELLED_ROWS = 2_625
COMMON: dict[str, Any] = {"model_name": ENDPOINT, "endpoint": {"name": ENDPOINT}}


@dataclass(frozen=True)
class Demo:
    """The running demo, the most rows of a file, and whether the machine is too busy for latency gates."""

    run: DemoRun
    max_rows: int | None
    is_busy: bool

    def act(self, title: str, name: str, release: Mapping[str, Any]) -> Result:
        """Run the flow with what all acts have in common; returns its result."""
        canary = CANARY | ({"latency_gates": None} if self.is_busy else {})
        return self.run.release(title, name, COMMON | {"canary": canary} | dict(release))

    @property
    def evaluation(self) -> dict[str, Any]:
        """The evaluation on held-out diagnoses of unseen categories."""
        return {"evaluation": EVALUATION | {"file": self.rows("validation")}}

    def rows(self, name: str) -> str:
        """A data file, or its first rows."""
        return self.run.rows(name, self.max_rows)


def main() -> int:
    """Run the four acts; 0 when each ended as it should."""
    parser = argparse.ArgumentParser(description="Four releases of a real model on one machine.")
    parser.add_argument("--folder", type=Path, default=ROOT / ".demo", help="emptied at the start")
    parser.add_argument(
        "--busy", action="store_true", help="other programs use this machine: no latency gates"
    )
    parser.add_argument(
        "--rows",
        type=number_of_rows,
        help=f"train and validate on the first so many rows of each file, {FEWEST_ROWS} or more",
    )
    parser.add_argument("--plain", action="store_true", help="write lines on a terminal, too")
    chosen = parser.parse_args()
    started = time.monotonic()
    memory = Memory()
    memory.start()
    folder = emptied(chosen.folder.resolve())
    with running(folder, SERVICE_SETTINGS, is_plain=chosen.plain) as run:
        acts, failures = play(Demo(run, chosen.rows, chosen.busy))
    summary(acts, folder, time.monotonic() - started, memory)
    for failure in failures:
        say(f"FAILED: {failure}")
    return 1 if failures else 0


def play(demo: Demo) -> tuple[dict[str, Result], list[str]]:
    """Run the four acts; returns their results and every expectation that was not met."""
    acts: dict[str, Result] = {}
    failures: list[str] = []
    plays = {
        "act 1": good_release,
        "act 2": bad_data,
        "act 3": bad_behaviour,
        "act 4": worse_answers,
    }
    for name, act in plays.items():
        acts[name], unmet = act(demo, acts)
        failures += [f"{name}: {expectation}" for expectation in unmet]
        if failures:
            break  # each act builds on the one before
    return acts, failures


Acts = Mapping[str, Result]


def good_release(demo: Demo, _: Acts) -> tuple[Result, list[str]]:
    """Combine the rows of two hospitals, tune a model on them and promote it over the base model."""
    files = [demo.rows("hospital_a"), demo.rows("hospital_b")]
    release = demo.act(
        "== Act 1: a release. Two hospitals' diagnoses tune the base model",
        "act1",
        TRAINING
        | {"data": {"files": files, "validation_file": demo.rows("validation")}}
        | demo.evaluation,
    )
    unmet = unexpected_outcome(release, "promoted", "none")
    if not unmet:
        before, after = exact_matches(release)
        say(
            f"exact chapter titles of unseen categories: {before:.1f} % before, {after:.1f} % after;"
            f" {release['evaluation']['sentence']}"
        )
    return release, unmet


def bad_data(demo: Demo, _: Acts) -> tuple[Result, list[str]]:
    """Train on shuffled answers, which the training gate refuses by comparing with the baseline."""
    rows = min(demo.max_rows or MISLABELLED_ROWS, MISLABELLED_ROWS)
    files = [demo.run.rows("mislabelled", rows)]
    data = {"files": files, "validation_file": demo.rows("validation")}
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


def bad_behaviour(demo: Demo, acts: Acts) -> tuple[Result, list[str]]:
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
    if demo.run.split(ENDPOINT).get(champion) != 100:
        unmet.append("the endpoint does not serve the baseline")
    return returned, unmet


def worse_answers(demo: Demo, acts: Acts) -> tuple[Result, list[str]]:
    """Release the model of act 2 by its name, as if somebody bypassed the training gates: its answers are worse."""
    champion = acts["act 1"]["candidate_deployment_id"]
    refused = demo.act(
        "== Act 4: worse answers. The model of act 2, released by its name past the training gates",
        "act4",
        {"model": acts["act 2"]["model"]} | demo.evaluation,
    )
    for note in refused.get("notes", []):
        say(note)
    unmet = unexpected_outcome(refused, "rejected", "evaluation")
    if not refused.get("candidate_deleted"):
        unmet.append("the candidate's deployment was not deleted")
    if demo.run.split(ENDPOINT).get(champion) != 100:
        unmet.append("the endpoint does not serve the baseline")
    return refused, unmet


if __name__ == "__main__":
    stop_once(say)
    try:
        sys.exit(main())
    except Stopped as stopped:
        say("stopped; nothing is left running")
        sys.exit(stopped.exit_code)
