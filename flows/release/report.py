"""Writes the report of a release: Markdown with pictures in a folder, and the same on the run's page in Prefect.

Every limit stands beside its value. Ids, counts and numbers only; never a prompt, a completion or a line of a dataset.
"""

import base64
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.forms.release_form import ReleaseParameters
from flows.release.plots import Limit, limits_of, plot_losses, plot_rollout
from flows.release.result import Contender, ReleaseResult
from flows.release.step_load import StepLoad, explained, loads_by_step, rows
from flows.rollout.words import in_words
from flows.shared.links import show_link
from flows.shared.markdown import plain
from tasks.jobs import get_job_metrics
from tasks.metrics import get_deployment_metrics
from tuneship.client import TuneshipError
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.metrics_reader import read_series
from tuneship.gates.record import Phase
from tuneship.gates.series import RolloutSeries, Unusable

DECISIONS_SHOWN = 25
LOSS_GATES = ("T4 champion", "T9 first model", "T3 learned")
OUTCOMES = {
    "promoted": "The new model serves all traffic.",
    "rolled_back": "The traffic went back to the model that served before.",
    "rejected": "The new model got no traffic.",
    "paused": "The split is frozen until a person decides.",
    "aborted": "The run was stopped.",
    "rollback_incomplete": "The traffic could not be returned: look at the endpoint now.",
}


def write_report(result: ReleaseResult, release: ReleaseParameters, folder: Path) -> Path:
    """Write `report.md` and its pictures, show them in Prefect, and return the report's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: list[str] = []
    loads: list[StepLoad] = []
    # The job may be gone by now: the report then has no loss curves.
    with suppress(TuneshipError):
        losses = get_job_metrics(result.job_id) if result.job_id else None
        if losses is not None and losses.steps:
            plot_losses(losses, _limits(result, release), folder / "loss.png")
            pictures.append("loss.png")
    if result.history and result.candidate_deployment_id:
        file = folder / "rollout.png"
        series = _series(result, release)
        loads = loads_by_step(result.history, series, result.candidate_deployment_id)
        if plot_rollout(result.history, series, result.candidate_deployment_id, file):
            pictures.append(file.name)
    text = report(result, release, pictures, loads)
    file = folder / "report.md"
    file.write_text(text)
    show_report(result, release, text, file)
    return file


def show_report(result: ReleaseResult, release: ReleaseParameters, text: str, file: Path) -> None:
    """Show the report and its summary on the run's page in Prefect."""
    # The UI renders the cells of this table as Markdown, `[..](javascript:..)` among it.
    cells = [{name: plain(text) for name, text in row.items()} for row in summary(result, release)]
    create_table_artifact(cells, key="release", description=result.outcome)
    page = with_pictures(text, file.parent)
    create_markdown_artifact(page, key="release-report", description=str(file))
    if result.endpoint_id:
        show_link("endpoint", result.endpoint_id)


def with_pictures(text: str, folder: Path) -> str:
    """Embed the pictures in the Markdown: the Prefect UI cannot reach files beside it."""

    def inside(link: re.Match[str]) -> str:
        content = base64.b64encode((folder / link[2]).read_bytes()).decode()
        return f"![{link[1]}](data:image/png;base64,{content})"

    return re.sub(r"!\[([^\]]*)\]\((\w+\.png)\)", inside, text)


def report(
    result: ReleaseResult,
    release: ReleaseParameters,
    pictures: Sequence[str],
    loads: Sequence[StepLoad] = (),
) -> str:
    """Compose the report as Markdown; `pictures` are files beside it, `loads` explain the one of the rollout."""
    lines = [
        f"# Release of {release.model_name}: {result.outcome}",
        "",
        OUTCOMES[result.outcome] + _reason(result),
        "",
        *(f"- {plain(note)}" for note in result.notes),
        "",
        *_table(
            ["what", "value"], [[row["what"], row["value"]] for row in summary(result, release)]
        ),
    ]
    if result.training_gates:
        rows = [
            [
                gate["name"],
                gate["state"],
                _number(gate["value"]),
                _number(gate["limit"]),
                gate["note"],
            ]
            for gate in result.training_gates
        ]
        lines += [
            "## Training gates",
            "",
            *_table(["gate", "state", "value", "limit", "note"], rows),
        ]
    if result.contenders:
        lines += ["## Hyperparameter sets", "", *_contenders(result.contenders)]
    if "loss.png" in pictures:
        lines += ["![Loss curves](loss.png)", ""]
    if result.forecast:
        lines += ["## Forecast before the first shift", "", *_list(result.forecast["in_words"])]
    if result.history:
        lines += ["## Traffic", "", *_table(["time", "split", "why"], _history(result)), ""]
    if "rollout.png" in pictures:
        lines += ["![Traffic, errors and latency](rollout.png)", "", *_loads(loads)]
    if result.decisions:
        lines += ["## Gates at the last comparison", "", *_list(result.in_words)]
        compared = [look for look in result.decisions if look["phase"] != Phase.SETTLE]
        lines += _gates(compared[-1]) if compared else []
        lines += ["## Decisions", "", *_decisions(result.decisions)]
    return "\n".join(lines) + "\n"


def _reason(result: ReleaseResult) -> str:
    if result.reason == "none":
        return ""
    text = f" Reason: `{result.reason}`" + (f", gate `{result.gate}`" if result.gate else "")
    meant = in_words(result.reason)
    return text + ("." if meant == result.reason else f": {meant}.")


def summary(result: ReleaseResult, release: ReleaseParameters) -> list[dict[str, str]]:
    """The release in a few rows."""
    accuracy, tags = result.accuracy, release.deployment.tags
    candidate = result.candidate_deployment_id
    if candidate and result.candidate_deleted:
        candidate += " (deleted)"
    rows = {
        "outcome": result.headline,
        "model": result.model,
        "champion before": result.champion_model,
        "base model": release.base_model,
        "job": result.job_id,
        "baseline deployment": result.baseline_deployment_id,
        "candidate deployment": candidate,
        "candidate's tags": ", ".join(f"{tag}={value}" for tag, value in tags.items()),
        "endpoint": result.endpoint_id,
        "requests of the pipeline": _driver(result.driver),
        "exact match before": _share(accuracy.before, accuracy.rows) if accuracy else None,
        "exact match after": _share(accuracy.after, accuracy.rows) if accuracy else None,
        "run key": result.run_key,
    }
    return [{"what": what, "value": value} for what, value in rows.items() if value]


def _limits(result: ReleaseResult, release: ReleaseParameters) -> list[Limit]:
    """The limits by which the gates on the validation loss decided, or those known before."""
    limits = [
        Limit(gate["name"], gate["limit"])
        for gate in result.training_gates
        if gate["name"] in LOSS_GATES and gate["limit"] is not None
    ]
    return limits or limits_of(release.training_gates, result.champion_validation_loss)


def _loads(loads: Sequence[StepLoad]) -> list[str]:
    cells = rows(loads)
    if not cells:
        return []
    titles = [
        "candidate's share",
        "candidate: requests/s",
        "candidate: p95",
        "baseline: requests/s",
        "baseline: p95",
    ]
    text = explained(loads)
    return [*([text, ""] if text else []), *_table(titles, cells)]


def _contenders(contenders: Sequence[Contender]) -> list[str]:
    titles = ["job", "set", "status", "lowest validation loss", "model", ""]
    rows = [
        [
            contender.job_id,
            ", ".join(f"{name} {value}" for name, value in contender.hyperparameters.items()),
            contender.status,
            _number(contender.validation_loss),
            contender.model or "-",
            "goes on" if contender.is_best else "",
        ]
        for contender in contenders
    ]
    return _table(titles, rows)


def _series(result: ReleaseResult, release: ReleaseParameters) -> RolloutSeries | None:
    """Both deployments' metrics since the first shift; None where they are gone (the decisions keep the counts)."""
    began = min((change.at for change in result.history if change.at), default=None)

    def ask(deployment_id: str | None) -> DeploymentMetrics:
        return get_deployment_metrics(
            str(deployment_id),
            interval=release.canary.interval,
            start_time=began,
            endpoint_id=result.endpoint_id,
        )

    try:
        baseline = ask(result.baseline_deployment_id)
        candidate = ask(result.candidate_deployment_id)
        return read_series(baseline, candidate, release.canary.interval)
    except (TuneshipError, Unusable):
        return None


def _driver(driver: dict[str, float] | None) -> str | None:
    if not driver:
        return None
    lost = driver["abandoned_candidate"] + driver["abandoned_baseline"] + driver["unanswered"]
    return f"{driver['candidate'] + driver['baseline']:g} answered or failed, {lost:g} broken off"


def _history(result: ReleaseResult) -> list[list[str]]:
    names = {
        result.baseline_deployment_id: "baseline",
        result.candidate_deployment_id: "candidate",
    }
    return [
        [
            change.at.strftime("%Y-%m-%d %H:%M:%S") if change.at else "start",
            ", ".join(f"{names.get(who, who)} {share} %" for who, share in change.weights.items()),
            change.why,
        ]
        for change in result.history
    ]


def _gates(decision: dict[str, Any]) -> list[str]:
    titles = ["gate", "state", "candidate", "baseline", "harm: ln E (limit)", "proof: ln E (limit)"]
    rows = [
        [
            name,
            gate["state"],
            _share(gate["candidate_bad"], gate["candidate_requests"]),
            _share(gate["baseline_bad"], gate["baseline_requests"]),
            f"{_number(gate.get('log_e_harm'))} ({_number(gate.get('log_e_harm_limit'))})",
            f"{_number(gate.get('log_e_ok'))} ({_number(gate.get('log_e_ok_limit'))})",
        ]
        for name, gate in decision["gates"].items()
    ]
    return _table(titles, rows)


def _decisions(decisions: Sequence[dict[str, Any]]) -> list[str]:
    """List the looks that changed the split, and the last ones."""
    moved = [look for look in decisions if look["verdict"] != "hold"]
    shown = moved[-DECISIONS_SHOWN:]
    rows = [
        [look["look"], f"{look['step']} %", look["verdict"], look["reason"], look["step_requests"]]
        for look in shown
    ]
    titles = ["look", "candidate's share", "verdict", "reason", "candidate requests at this step"]
    return [
        f"{len(decisions)} looks, {len(moved)} of them moved something.",
        "",
        *_table(titles, rows),
    ]


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    cells = [[plain(cell) for cell in line] for line in lines]
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def _list(sentences: Sequence[str]) -> list[str]:
    return [*(f"- {sentence}" for sentence in sentences), ""]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
