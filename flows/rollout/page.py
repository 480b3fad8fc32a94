"""Shows a rollout to people: progress at each look; at each transition a log line and a new Markdown artifact.

Counts, shares and evidence, every limit beside its value; never a prompt or a completion.
"""

from collections.abc import Sequence

from prefect.artifacts import create_markdown_artifact

from flows.rollout.result import RolloutResult
from flows.rollout.split import Log, RolloutSplit
from tuneship.cards.markdown import code, sentence, table
from tuneship.gates.record import Look, RolloutRecord, Verdict
from tuneship.gates.reports.tables import gate_table, look_table, share, threshold_table
from tuneship.gates.reports.words import (
    all_in_words,
    driver_in_words,
    forecast_in_words,
    gates_in_words,
    in_words,
    look_in_words,
)
from tuneship.prefect.progress import report


def report_look(split: RolloutSplit, look: Look) -> None:
    """Report progress; where the split changes, write a log line and the page."""
    why = ", ".join(look.reasons) or look.reason
    # Records say look; people read check.
    needed = f" ({look.needed.replace('look', 'check')})" if look.needed else ""
    reasons = look.reasons or [look.reason]
    said = str(look.verdict) if reasons == ["none"] else f"{look.verdict}, {all_in_words(reasons)}"
    report("canary", look.weight, 100, f"check {look.number}: {said}{needed}".replace("`", ""))
    # Most looks hold: a line and a page for each would bury the rest.
    if look.verdict is Verdict.HOLD:
        return
    gates: list[str] = []
    for gate in look.gates:
        if gate.candidate_requests:
            candidate = share(gate.candidate_bad, gate.candidate_requests)
            baseline = share(gate.baseline_bad, gate.baseline_requests)
            gates.append(f"{gate.name} {candidate} v {baseline} {gate.state}")
    split.log.info(
        "check %d at %d %%: %s%s; %s",
        look.number,
        look.weight,
        look.verdict,
        "" if why == "none" else f" ({why})",
        "; ".join(gates) or "no requests",
    )
    show(split.file.record, split.log)


def show(record: RolloutRecord, log: Log, result: RolloutResult | None = None) -> None:
    """Write the page. A page that cannot be written never stops a rollout."""
    begun = record.begun
    try:
        create_markdown_artifact(
            key=begun.rollout_id, markdown=page(record, result), description="Canary rollout"
        )
    except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the traffic matters more than its page
        log.warning("the rollout's page was not written (%s)", type(error).__name__)


def page(record: RolloutRecord, result: RolloutResult | None = None) -> str:
    """The rollout as Markdown."""
    begun, looks = record.begun, record.looks
    plan = begun.plan
    ids = (code(plan[f"{one}_deployment_id"]) for one in ("baseline", "candidate"))
    pair = "Baseline {}, candidate {}".format(*ids)
    bake = plan.get("bake_weight") or 100
    state = f"at {record.weight} %"
    if result:
        meaning = "" if result.reason == "none" else f": {in_words(result.reason)}"
        state = f"**{result.headline}**{meaning}"
    sections = [
        f"# Rollout {begun.rollout_id}",
        f"Endpoint {code(begun.endpoint_id)}: {state}",
        f"{pair}, steps {plan['steps']}, bake at {bake} %",
    ]
    if result and result.notes:
        sections.append("\n".join(f"- {sentence(note)}" for note in result.notes))
    warnings = [f"warning: {text}" for text in begun.warnings]
    if sentences := [*forecast_in_words(begun), *warnings]:
        sections += ["## Forecast", listed(sentences)]
    if driver := driver_in_words(record):
        sections.append(driver)
    if looks:
        gates = compared.gates if (compared := record.last_comparison) else ()
        sections += ["## Gates at the last comparison", listed(gates_in_words(gates))]
        sections += [listed(look_in_words(looks[-1])), table(*gate_table(gates))]
        if looks[-1].thresholds:
            sections += ["## Plain thresholds", table(*threshold_table(looks[-1].thresholds))]
        sections += ["## Checks", table(*look_table(looks))]
    return "\n\n".join(section for section in sections if section) + "\n"


def listed(sentences: Sequence[str]) -> str:
    """Make a Markdown list of sentences written here, which need no escaping."""
    return "\n".join(f"- {one}" for one in sentences)
