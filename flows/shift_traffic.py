"""Shift an endpoint's traffic from a baseline deployment to a candidate, step by step, while its gates allow it.

Order: open the record -> find or create the endpoint -> forecast -> first step -> looks (renew the lease, read both
deployments' metrics, decide, move) -> bake at 80 % -> 100 % -> retire the baseline. Requires: two
deployments. Parameters: `CanaryPlan`. `tuneship/gates/canary.py` decides; `flows/rollout/rollback.py` returns the
traffic.
"""

import sys
from pathlib import Path

if (
    __name__ == "__main__"
):  # a script finds its modules in the project's folder, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flows  # noqa: F401  # pyright: ignore[reportUnusedImport] - first: Prefect looks at its telemetry setting when imported

# isort: split
from contextlib import ExitStack

from prefect import flow, get_run_logger
from prefect.runtime import flow_run

from flows.rollout.endings import end, finish_interrupted, lost, roll_back
from flows.rollout.looks import every, look_once
from flows.rollout.opening import explained, open_rollout, settle
from flows.rollout.page import report_look, show
from flows.rollout.promotion_approval import ask_for_approval, record_answer, withdraw_question
from flows.rollout.record_file import records_in_use
from flows.rollout.result import RollbackIncomplete, RolloutResult, rejected, result_of
from flows.rollout.rollback import return_traffic, rollback_on_error
from flows.rollout.split import NotConfirmed, PausedByPerson, RolloutSplit, SplitLost
from flows.rollout.tracked import track_rollout
from flows.rollout.traffic_driver import TrafficDriver, read_prompts
from flows.shared.approval import can_be_answered
from flows.shared.errors import BadInput
from flows.shared.journal import NotWritten
from tuneship.gates.plan import CanaryPlan, CanaryRules
from tuneship.gates.record import Ended, Verdict
from tuneship.prefect.connection import api


@flow(
    name="shift-traffic",
    flow_run_name="shift-to-{plan.candidate_deployment_id}",
    on_failure=[return_traffic],
    on_crashed=[return_traffic],
    on_cancellation=[return_traffic],
)
def shift_traffic(plan: CanaryPlan) -> RolloutResult:
    """Roll the candidate out as `plan` says, or return the traffic; the result names one outcome and its reason.

    Raises `RollbackIncomplete` where the traffic could not be returned, which makes the run Failed.
    """
    log, prompts = get_run_logger(), ready(plan)
    folder = records_in_use()
    with folder.lock(plan) as is_free:
        if not is_free:
            busy = rejected("rollout_in_progress", "another run drives it", plan.endpoint_id)
            return explained(busy, log)
        split = open_rollout(plan, folder, log)
        if isinstance(split, RolloutResult):
            return explained(split, log)
        # The driver waits for its open answers outside: first the traffic is where it belongs, and the record says so.
        with ExitStack() as driving:
            with rollback_on_error(split):
                ended = drive(split, prompts, driving)
                split.file.append_if_possible(ended)
            withdraw_question(split.file, ended.outcome)
    result = result_of(split.file.record, list(dict.fromkeys(split.notes + split.file.unwritten)))
    show(split.file.record, log, result)
    log.info("%s", result.headline)
    if flow_run.parent_flow_run_id is None:  # else a release writes it, with its training
        track_rollout(plan, result)
    if result.outcome == "rollback_incomplete":
        message = f"the split of {result.endpoint_id} was not returned: {result.reason}"
        raise RollbackIncomplete(result, message)
    return result


def ready(rules: CanaryRules) -> list[str]:
    """Return the traffic driver's prompts. Raises `BadInput` for a plan that cannot run here."""
    if rules.approval == "required" and not can_be_answered():
        raise BadInput(
            'approval: "required" needs a place where a person can answer: a service with releases and a key that'
            " has their scopes, or a Prefect server that outlives this run: start one (`make up`, or one of your"
            " own as docs/operations.md says) and set PREFECT_API_URL"
        )
    return read_prompts(Path(rules.traffic.prompts)) if rules.traffic else []


def drive(split: RolloutSplit, prompts: list[str], driving: ExitStack) -> Ended:
    """Resume from the record and run to completion; the plan's traffic driver runs until `driving` is closed."""
    traffic = split.plan.traffic
    driver = TrafficDriver(api().settings, split.endpoint_id, traffic, prompts) if traffic else None
    try:
        try:
            settle(split)
            if driver:
                driving.enter_context(driver)
            return finish_interrupted(split) or look_until_over(split, driver)
        except NotConfirmed as error:
            split.log.warning("%s", error)
            return roll_back(split, "shift_unconfirmed")
        except NotWritten as error:
            split.log.critical(
                "%s: %s; nothing moves without a record", error.filename, error.strerror
            )
            split.notes.append(
                f"the record {error.filename} could not be written ({error.strerror})"
            )
            return roll_back(split, "record_not_writable", outcome="aborted")
    except SplitLost as error:
        return lost(split, error.reason)


def look_until_over(split: RolloutSplit, driver: TrafficDriver | None) -> Ended:
    """Take the first step, then look after look: renew the lease, read the metrics, decide, act."""
    if split.file.record.weight == 0:
        split.shift(split.plan.known_steps[0], "first step")
    pace = every(split.plan.look_every_seconds)
    while True:
        next(pace)
        record_answer(split)
        look = look_once(split, driver)
        report_look(split, look)
        try:
            if look.verdict in (Verdict.ADVANCE, Verdict.PROMOTE) and look.next_weight is not None:
                split.shift(look.next_weight, look.verdict)
            elif look.verdict is Verdict.ASK:
                ask_for_approval(split)
            elif look.verdict is not Verdict.HOLD:
                return end(split, look)
        except PausedByPerson:
            split.log.warning("a person has paused the rollout: the split stays as it is")


if __name__ == "__main__":
    from flows.forms.plan_file import PlanFile
    from flows.script.main import run_script

    run_script(
        shift_traffic,
        PlanFile,
        "Shift an endpoint's traffic to a candidate deployment.",
        stages=("shift", "promote"),
    )
