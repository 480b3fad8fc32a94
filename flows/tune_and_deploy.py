"""A release, from JSON Lines files to promoted traffic; `_release` is the whole story on one screen.

validate -> upload -> merge -> fine-tune -> training gates -> deploy -> smoke test -> evaluation -> canary -> report

Requires a service (`TUNESHIP_URL`, or the script's own). Run it from the Prefect UI, on a schedule, or as
`python flows/tune_and_deploy.py --params release.yaml [--result out.json]`. Parameters: `flows/forms/release_form.py`.
"""

import sys
from pathlib import Path

if (
    __name__ == "__main__"
):  # a script finds its modules in the project's folder, which need not be installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flows  # noqa: F401  # pyright: ignore[reportUnusedImport] - first: Prefect looks at its telemetry setting when imported

# isort: split
from prefect import flow, get_run_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.champion import Champion, SplitIsShared, find_champion
from flows.release.closing import clean_up
from flows.release.data import resolve, upload_and_merge, validate_files
from flows.release.endpoint_lock import endpoint_lock
from flows.release.evaluation import measure_accuracy, smoke_test
from flows.release.held_out import check_evaluation, evaluate
from flows.release.known_model import refuse_unknown_model
from flows.release.release_run import (
    ReleaseRun,
    begin,
    finish,
    keep_what_is_known,
    result_of_this_process,
)
from flows.release.reports.assets import record_dataset, record_model
from flows.release.reports.tracked import chosen_trackers
from flows.release.result import ReleaseResult
from flows.release.training import judge, train
from flows.rollout.opening import foresee
from flows.rollout.result import RolloutResult
from flows.shift_traffic import ready, shift_traffic


@flow(
    name="tune-and-deploy",
    flow_run_name="release-{release.model_name}",
    on_failure=[clean_up],
    on_crashed=[clean_up],
    on_cancellation=[clean_up],
)
def tune_and_deploy(release: ReleaseParameters) -> ReleaseResult:
    """Tune a model, and shift traffic to it step by step while its gates allow it."""
    ready(release.canary)  # a plan that cannot run here is refused before anything is created
    chosen_trackers(release.tracking)  # and so is a setting that is wrong
    refuse_unknown_model(release)  # a typo must not wait for another release of the endpoint
    with endpoint_lock(release.endpoint):
        run = begin(release)
        try:
            try:
                result = _release(release, run)
            except BaseException as error:
                keep_what_is_known(run, error)
                raise
            return finish(run, result)
        finally:
            run.record.release()


def _release(release: ReleaseParameters, run: ReleaseRun) -> ReleaseResult:
    # A killed run resumes in its rollout: by now the split no longer shows who was the champion.
    if resumed := run.rollout_to_resume():
        is_over = isinstance(resumed, RolloutResult)
        return run.result_of_rollout(resumed if is_over else shift_traffic(resumed))

    try:
        champion = find_champion(release.endpoint)
    except SplitIsShared as error:
        return run.rejected("rollout_in_progress", str(error))
    if champion:
        champion.refuse_other_mode(release.security_settings.compliance_mode)
        # Hours of training are too late to learn that today's traffic cannot decide.
        plan = release.plan(champion.endpoint_id, champion.deployment_id, "candidate")
        if result := foresee(plan, get_run_logger()):
            return run.result_of_rollout(result)

    check_evaluation(release)
    if result := _tune(release, run, champion):
        return result

    if champion:
        baseline_id = champion.deployment_id
    else:
        # The first release has nothing but its base model to be compared with.
        get_run_logger().info("first release: %s is the baseline", release.base_model)
        baseline_id = run.deploy("baseline", release.base_model, {})
    candidate_id = run.deploy("candidate", run.model, release.deployment.tags)
    if field_error := _compare_answers(release, run, baseline_id, candidate_id):
        return field_error

    plan = release.plan(champion.endpoint_id if champion else None, baseline_id, candidate_id)
    if champion is None or champion.measured is None:
        # The baseline is a base model, and tuning is meant to change the length of its answers.
        quality = plan.quality_gates
        if quality is not None:
            quality = quality.model_copy(update={"short": None, "long": None})
        plan = plan.model_copy(update={"output_length": None, "quality_gates": quality})
    run.record_plan(plan)
    return run.result_of_rollout(shift_traffic(plan))


def _tune(
    release: ReleaseParameters, run: ReleaseRun, champion: Champion | None
) -> ReleaseResult | None:
    """Make the model that is released, unless it exists; return the result when that is refused."""
    run.set_champion(champion)
    if release.data is None:
        return run.use_model(str(release.model))
    data = resolve(release.data)
    validate_files(data, release.base_model)
    prepared = upload_and_merge(data, release.model_name, run.key)
    record_dataset(prepared)
    run.note_data(prepared)
    if result := run.rejected_if_rolled_back(prepared.content):
        return result
    job, metrics = train(release, prepared, run, champion)
    verdict = judge(run, prepared, job, metrics, champion)
    record_model(prepared, job, verdict)
    return run.check_training(verdict)


def _compare_answers(
    release: ReleaseParameters, run: ReleaseRun, baseline_id: str, candidate_id: str
) -> ReleaseResult | None:
    """Compare both deployments' answers while the candidate has no traffic; return the result when it is refused."""
    if refused := run.check_smoke_test(smoke_test(baseline_id, candidate_id, release)):
        return refused
    run.set_accuracy(measure_accuracy(baseline_id, candidate_id, release))
    return run.check_evaluation(evaluate(baseline_id, candidate_id, release, run.key))


if __name__ == "__main__":
    from flows.script.main import run_script
    from flows.script.picture_state import STAGES

    run_script(
        tune_and_deploy,
        ReleaseParameters,
        "Tune a model and release it step by step.",
        result_of_this_process,
        STAGES,
    )
