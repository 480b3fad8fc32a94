"""Writes the report of a release: Markdown with pictures in a folder, and the same on the run's page in Prefect.

Every limit stands beside its value. Ids, counts and numbers only; never a prompt, a completion or a line of a dataset.
"""

import base64
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from flows.forms.release_form import ReleaseParameters
from flows.release.loss_limits import Limit
from flows.release.result import ReleaseResult
from flows.shared.links import show_link
from flows.shared.private_files import make_private
from tasks.jobs import get_job_metrics
from tasks.metrics import get_deployment_metrics
from tuneship.cards.markdown import number, plain, sentence, table
from tuneship.cards.rendering import interval
from tuneship.client import TuneshipError
from tuneship.contract.common import count
from tuneship.contract.evaluations import GraderReport, Score
from tuneship.gates.evaluation.evaluation_words import SLICE_WORDS
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.metrics.series import RolloutSeries, Unusable
from tuneship.gates.reports.step_load import StepLoad, explained, load_table, loads_by_step
from tuneship.gates.reports.words import OUTCOMES, in_words
from tuneship.host.durable import write_private

DECISIONS_SHOWN = 25
# `ln E` is the logarithm of an e-value; its limit stands beside it, because that differs by gate.
GATE_TITLES = (
    "gate",
    "state",
    "candidate",
    "baseline",
    "harm: ln E (limit)",
    "proof: ln E (limit)",
)
DECISION_TITLES = (
    "check",
    "candidate's share",
    "verdict",
    "reason",
    "candidate requests at this step",
)
LOSS_GATES = ("T4 champion", "T9 first model", "T3 learned")


def write_report(result: ReleaseResult, release: ReleaseParameters, folder: Path) -> Path:
    """Write `report.md` and its pictures, show them in Prefect, and return the report's path."""
    make_private(folder)
    pictures: list[str] = []
    loads: list[StepLoad] = []
    # The job may be gone by now: the report then has no loss curves.
    with suppress(TuneshipError):
        losses = get_job_metrics(result.job_id) if result.job_id else None
        if losses is not None and losses.steps:
            from flows.release.reports.plots import plot_losses  # noqa: PLC0415 - starts slowly

            limits = [
                Limit(gate["name"], gate["limit"], gate["value"])
                for gate in result.training_gates
                if gate["name"] in LOSS_GATES and gate["limit"] is not None
            ]
            plot_losses(losses, limits, folder / "loss.png")
            pictures.append("loss.png")
    if result.evaluation is not None:
        from flows.release.reports.plots import plot_evaluation  # noqa: PLC0415 - starts slowly

        if plot_evaluation(result.evaluation, release.evaluation, folder / "evaluation.png"):
            pictures.append("evaluation.png")
    if result.history and result.candidate_deployment_id:
        from flows.release.reports.plots import plot_rollout  # noqa: PLC0415 - starts slowly

        file = folder / "rollout.png"
        series = _series(result, release)
        loads = loads_by_step(result.history, series, result.candidate_deployment_id)
        if plot_rollout(result.history, series, result.candidate_deployment_id, file):
            pictures.append(file.name)
    text = report(result, release, pictures, loads)
    file = folder / "report.md"
    write_private(file, text)
    for name in pictures:
        (folder / name).chmod(0o600)
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
    ending = OUTCOMES[result.outcome]
    if result.reason != "none":
        ending += f" Reason: `{result.reason}`" + (f", gate `{result.gate}`" if result.gate else "")
        meant = in_words(result.reason)
        # A reason without words of its own, such as that of an older record, is not said twice.
        ending += "." if meant == result.reason else f": {meant}."
    lines = [
        f"# Release of {release.model_name}: {result.outcome}",
        "",
        ending,
        "",
        *(f"- {sentence(note)}" for note in result.notes),
        "",
        *_table(
            ["what", "value"], [[row["what"], row["value"]] for row in summary(result, release)]
        ),
        *_training(result),
    ]
    lines += _evaluation(result, pictures)
    if "loss.png" in pictures:
        lines += ["![Loss curves](loss.png)", ""]
    if result.forecast:
        lines += ["## Forecast before the first shift", "", *_list(result.forecast["in_words"])]
    lines += _traffic(result, pictures, loads)
    if result.decisions:
        lines += _decisions(result)
    return "\n".join(lines) + "\n"


def summary(result: ReleaseResult, release: ReleaseParameters) -> list[dict[str, str]]:
    """The release in a few rows."""
    accuracy, tags = result.accuracy, release.deployment.tags
    candidate = result.candidate_deployment_id
    if candidate and result.candidate_deleted:
        candidate += " (deleted)"
    requests = None
    if driver := result.driver:
        # Requests that broke off are in no deployment's count, so they have a line of their own.
        lost = driver["abandoned_candidate"] + driver["abandoned_baseline"] + driver["unanswered"]
        answered = driver["candidate"] + driver["baseline"]
        requests = f"{answered:g} answered or failed, {lost:g} broken off"
    facts = {
        "outcome": result.headline,
        "model": result.model,
        "baseline model": result.champion_model,
        "base model": release.base_model,
        "job": result.job_id,
        "baseline deployment": result.baseline_deployment_id,
        "candidate deployment": candidate,
        "candidate's tags": ", ".join(f"{tag}={value}" for tag, value in tags.items()),
        "endpoint": result.endpoint_id,
        "requests of the pipeline": requests,
        "exact match before": _share(accuracy.before, accuracy.rows) if accuracy else None,
        "exact match after": _share(accuracy.after, accuracy.rows) if accuracy else None,
        "run key": result.run_key,
    }
    return [{"what": what, "value": value} for what, value in facts.items() if value]


def _training(result: ReleaseResult) -> list[str]:
    """The tables of the training gates and of the hyperparameter sets."""
    lines: list[str] = []
    if result.training_gates:
        gates = [
            [
                gate["name"],
                gate["state"],
                number(gate["value"]),
                number(gate["limit"]),
                gate["note"],
            ]
            for gate in result.training_gates
        ]
        titles = ["gate", "state", "value", "limit", "note"]
        lines += ["## Training gates", "", *_table(titles, gates)]
    if result.contenders:
        contenders = [
            [
                contender.job_id,
                ", ".join(f"{name} {value}" for name, value in contender.hyperparameters.items()),
                contender.status,
                number(contender.validation_loss),
                contender.model or "-",
                "released" if contender.is_best else "",
            ]
            for contender in result.contenders
        ]
        titles = ["job", "set", "status", "lowest validation loss", "model", ""]
        lines += ["## Hyperparameter sets", "", *_table(titles, contenders)]
    return lines


def _evaluation(result: ReleaseResult, pictures: Sequence[str]) -> list[str]:
    """The findings on held-out examples: the sentence, the graders, the slices, and the lines that were lost."""
    found = result.evaluation
    if found is None:
        return []
    graders = [
        [
            one.name if one.measure == "score" else f"{one.name} (loss, lower is better)",
            _mean(one, one.candidate),
            _mean(one, one.baseline),
            one.wins,
            one.losses,
            interval(one),
            one.verdict or "reported",
        ]
        for one in found.graders
    ]
    lines = ["## Held-out examples", "", sentence(found.sentence), ""]
    lines += _table(
        ["grader", "candidate", "baseline", "wins", "losses", "difference [90 %]", "verdict"],
        graders,
    )
    if found.slices:
        slices = [
            [
                f"{one.field} {one.value}",
                one.grader,
                one.examples,
                one.wins,
                one.losses,
                interval(one),
                SLICE_WORDS[one.verdict],
            ]
            for one in found.slices
        ]
        titles = ["slice", "grader", "examples", "wins", "losses", "difference [90 %]", ""]
        lines += _table(titles, slices)
    if "evaluation.png" in pictures:
        lines += ["![Differences with intervals](evaluation.png)", ""]
    if found.lost_lines:
        listed = ", ".join(map(str, found.lost_lines))
        lines += [f"Lines that only the baseline answered rightly, at most 20: {listed}.", ""]
    return lines


def _mean(grader: GraderReport, one: Score | None) -> str:
    if one is None:
        return "-"
    return f"{100 * one.score:.1f} %" if grader.measure == "score" else f"{one.score:.4f} nats"


def _series(result: ReleaseResult, release: ReleaseParameters) -> RolloutSeries | None:
    """Both deployments' metrics since the first shift; None where they are gone (the decisions keep the counts)."""
    began = min((change.at for change in result.history if change.at), default=None)
    interval = release.canary.interval
    try:
        baseline, candidate = (
            get_deployment_metrics(
                str(deployment_id),
                interval=interval,
                start_time=began,
                # The baseline may serve other endpoints too, under another load.
                endpoint_id=result.endpoint_id,
            )
            for deployment_id in (result.baseline_deployment_id, result.candidate_deployment_id)
        )
        return read_series(baseline, candidate, interval)
    except (TuneshipError, Unusable):
        return None


def _traffic(
    result: ReleaseResult, pictures: Sequence[str], loads: Sequence[StepLoad]
) -> list[str]:
    """The table of all changes of the split, then the picture of the rollout and the loads that explain it."""
    names = {
        result.baseline_deployment_id: "baseline",
        result.candidate_deployment_id: "candidate",
    }
    changes = [
        [
            change.at.strftime("%Y-%m-%d %H:%M:%S") if change.at else "start",
            ", ".join(f"{names.get(who, who)} {share} %" for who, share in change.weights.items()),
            change.why,
        ]
        for change in result.history
    ]
    lines: list[str] = []
    if changes:
        lines += ["## Traffic", "", *_table(["time", "split", "why"], changes), ""]
    if "rollout.png" in pictures:
        lines += ["![Traffic, errors and latency](rollout.png)", ""]
        shown = load_table(loads)
        if shown.rows:
            text = explained(loads)
            lines += [text, ""] if text else []
            lines += [table(*shown), ""]
    return lines


def _decisions(result: ReleaseResult) -> list[str]:
    """The gates at the last comparison, then the latest looks with another verdict than `hold`."""
    lines = ["## Gates at the last comparison", "", *_list(result.in_words)]
    if compared := result.comparisons:
        gates = [
            [
                name,
                gate["state"],
                _share(gate["candidate_bad"], gate["candidate_requests"]),
                _share(gate["baseline_bad"], gate["baseline_requests"]),
                f"{number(gate.get('log_e_harm'))} ({number(gate.get('log_e_harm_limit'))})",
                f"{number(gate.get('log_e_ok'))} ({number(gate.get('log_e_ok_limit'))})",
            ]
            for name, gate in compared[-1]["gates"].items()
        ]
        lines += _table(GATE_TITLES, gates)
    decided = [look for look in result.decisions if look["verdict"] != "hold"]
    looks = [
        [look["look"], f"{look['step']} %", look["verdict"], look["reason"], look["step_requests"]]
        for look in decided[-DECISIONS_SHOWN:]
    ]
    total = count(len(result.decisions), "check")
    summary = f"{total}, {len(decided)} of them with another verdict than hold."
    return [*lines, "## Decisions", "", summary, "", *_table(DECISION_TITLES, looks)]


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    return [table(titles, rows), ""]


def _list(sentences: Sequence[str]) -> list[str]:
    return [*(f"- {sentence}" for sentence in sentences), ""]


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"
