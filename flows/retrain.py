"""Train and release again when there is data that the serving model has not seen; else skip and say why.

find data -> choose what is new since the last success -> skip, or run the chain of `flows/tune_and_deploy.py`

Runs weekly and on new datasets from `prefect.yaml`, or as `python flows/retrain.py --params retrain.yaml`. The champion
is what the endpoint serves now. Requires `release.data`, as globs (`data/*.jsonl`) or as tags of datasets.
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
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.forms.release_form import ReleaseParameters, TrainingData
from flows.forms.retrain_form import MinimumNewExamples, RetrainFile, Skipped, TrainOn
from flows.release.closing import clean_up
from flows.release.data import is_tagged, resolve
from flows.release.endpoint_lock import endpoint_lock
from flows.release.known_model import refuse_unknown_model
from flows.release.new_data import last_success, new_parts, parts_of
from flows.release.result import ReleaseResult
from flows.shared.errors import BadInput
from flows.tune_and_deploy import tune_and_deploy
from tuneship.contract.common import count
from tuneship.settings import PipelineSettings


@flow(
    name="retrain",
    flow_run_name="retrain-{release.model_name}",
    on_failure=[clean_up],
    on_crashed=[clean_up],
    on_cancellation=[clean_up],
)
def retrain(
    release: ReleaseParameters,
    train_on: TrainOn = "everything",
    minimum_new_examples: MinimumNewExamples = 1,
    dataset_id: str | None = None,
) -> ReleaseResult | Skipped:
    """Release a model trained on newer data, or end as Skipped. The form shows these descriptions of the arguments.

    Args:
        release: As in `tune-and-deploy`; `data` is needed.
        train_on: All data that is found, or only what the last success did not have.
        minimum_new_examples: Fewer new examples than this are not worth a training: skip.
        dataset_id: The dataset whose event started this run.

    """
    if release.data is None:
        raise BadInput("release.data is needed: retraining trains")
    refuse_unknown_model(release)
    with endpoint_lock(release.endpoint):
        chosen = _choose(release, release.data, train_on, minimum_new_examples, dataset_id)
        if isinstance(chosen, Skipped):
            get_run_logger().info("skipped: %s", chosen.message)
            # A completed run that the Prefect UI shows as Skipped, with the reason; who calls the flow gets its data.
            state: State[Skipped] = Completed(name="Skipped", message=chosen.message, data=chosen)
            return state  # pyright: ignore[reportReturnType]
        return tune_and_deploy(release.model_copy(update={"data": chosen}))


def _choose(
    release: ReleaseParameters,
    wanted: TrainingData,
    train_on: TrainOn,
    minimum_new_examples: int,
    dataset_id: str | None,
) -> TrainingData | Skipped:
    """Choose the data to train on, every part by its name, or say why there is none."""
    if dataset_id is not None and not is_tagged(dataset_id, wanted):
        message = f"dataset {dataset_id} does not carry the tags of `release.data.dataset_tags`"
        return Skipped(reason="dataset_is_not_for_this", message=message)
    data = resolve(wanted, may_be_empty=True)
    parts = parts_of(data)
    if not parts:
        return Skipped(reason="no_data", message="no file and no dataset matches")
    success = last_success(release.endpoint, PipelineSettings().records)
    new = new_parts(parts, success)
    if success is not None and not new:
        message = f"nothing is newer than the success of {success.at:%Y-%m-%d %H:%M} UTC"
        return Skipped(reason="no_new_data", message=message)
    examples = sum(part.examples for part in new)
    if examples < minimum_new_examples:
        message = f"{count(examples, 'new example')}, {minimum_new_examples} wanted"
        return Skipped(reason="too_little_new_data", message=message)
    get_run_logger().info(
        "new: %d of %s, with %s", len(new), count(len(parts), "part"), count(examples, "example")
    )
    if train_on == "everything":
        return data
    files = [part.file for part in new if part.file]
    dataset_ids = [part.dataset_id for part in new if part.dataset_id]
    return data.model_copy(update={"files": files, "dataset_ids": dataset_ids})


if __name__ == "__main__":
    from flows.release.release_run import result_of_this_process
    from flows.script.main import run_script
    from flows.script.picture_state import STAGES

    def run(file: RetrainFile) -> ReleaseResult | Skipped:
        """Pass the file's fields to the flow."""
        return retrain(file.release, file.train_on, file.minimum_new_examples, file.dataset_id)

    run_script(
        run,
        RetrainFile,
        "Train and release again when there is new data.",
        result_of_this_process,
        STAGES,
    )
