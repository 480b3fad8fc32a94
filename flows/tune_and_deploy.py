"""A release, from JSON Lines files to promoted traffic. What happens when stands in `_release`, on one screen.

validate -> upload -> merge -> fine-tune -> training gates -> deploy -> smoke test -> canary -> report

Requires a service (`TUNESHIP_URL`, or the script's own). Run it from the Prefect UI, on a schedule, or as
`python flows/tune_and_deploy.py --params release.yaml [--result out.json]`. Parameters: `flows/forms/release_form.py`.
"""

import flows  # noqa: F401  # pyright: ignore[reportUnusedImport] - first: Prefect looks at its telemetry setting when imported

# isort: split
from prefect import flow, get_run_logger

from flows.forms.release_form import ReleaseParameters
from flows.release.champion import Champion, SplitIsShared, find_champion
from flows.release.clean_up import clean_up
from flows.release.data import resolve, upload_and_merge, validate_files
from flows.release.endpoint_lock import turn
from flows.release.evaluation import measure_accuracy, smoke_test
from flows.release.result import ReleaseResult
from flows.release.run import ReleaseRun, begin, finish, told_when_stopped
from flows.release.training import judge, train
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
    """Tune a model, and let it serve only as far as the evidence goes."""
    ready(release.canary)  # what the canary cannot do is refused before anything is made
    with turn(release.endpoint):
        run = begin(release)
        try:
            return finish(run, _release(release, run))
        finally:
            run.record.release()


def _release(release: ReleaseParameters, run: ReleaseRun) -> ReleaseResult:
    if begun := run.rollout_so_far():  # by now the split says nothing of who was the champion
        return run.rolled_out(begun if isinstance(begun, RolloutResult) else shift_traffic(begun))
    try:
        champion = find_champion(release.endpoint)
    except SplitIsShared as error:
        return run.rejected("rollout_in_progress", str(error))
    if champion:
        champion.refuse_other_mode(release.security_settings.compliance_mode)
    if refused := _tune(release, run, champion):
        return refused
    baseline_id = champion.deployment_id if champion else _deploy_base_model(release, run)
    candidate_id = run.deploy("candidate", run.model, release.deployment.tags)
    if refused := run.smoked(smoke_test(baseline_id, candidate_id, release)):
        return refused
    run.measured(measure_accuracy(baseline_id, candidate_id, release))
    plan = release.plan(champion.endpoint_id if champion else None, baseline_id, candidate_id)
    if champion is None or champion.measured is None:  # a base model: tuning is meant to change it
        plan = plan.model_copy(update={"output_length": None})
    return run.rolled_out(shift_traffic(run.rollout_begins(plan)))


def _tune(
    release: ReleaseParameters, run: ReleaseRun, champion: Champion | None
) -> ReleaseResult | None:
    """Make the model that is released, unless it exists; the result when that is refused."""
    run.against(champion)
    if release.data is None:
        return run.releasing(str(release.model))
    wanted = resolve(release.data)
    validate_files(wanted)
    data = upload_and_merge(wanted, release.model_name, run.key)
    if refused := run.refusal_of(data.content):
        return refused
    job, metrics = train(release, data, run)
    return run.judged(judge(release, data, job, metrics, champion))


def _deploy_base_model(release: ReleaseParameters, run: ReleaseRun) -> str:
    """The first release has nothing to be compared with but its base model."""
    get_run_logger().info("first release: the base model %s is the baseline", release.base_model)
    return run.deploy("baseline", release.base_model, {})


if __name__ == "__main__":
    from flows.script.main import run_script

    run_script(
        tune_and_deploy,
        ReleaseParameters,
        "Tune a model and release it step by step.",
        told_when_stopped,
    )
