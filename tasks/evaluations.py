"""Evaluations: create them once for a release, and read them."""

from prefect import task

from tasks.create_once import CREATES, made_before, marks, once
from tuneship.contract import evaluations
from tuneship.contract.evaluations import Evaluation, EvaluationCreate, Evaluations
from tuneship.prefect.connection import UPLOAD_DEADLINE_S, api
from tuneship.prefect.tasks import task_of, task_of_pages


@task(**CREATES, task_run_name="evaluate-{evaluation.candidate}")
def create_evaluation(evaluation: EvaluationCreate, run_key: str) -> Evaluation:
    """Order an evaluation, once for this run; one that it ordered before is found by its tags."""
    wanted = evaluation.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    create = (run_key, "create_evaluation", wanted)
    tags = marks(*create)
    for made in made_before(api().evaluations.iterate(limit=100, tags=tags), tags):
        return api().evaluations.get(made.id)
    tagged = evaluation.model_copy(update={"tags": {**evaluation.tags, **tags}})
    # The service reads the whole file before it answers.
    return once(*create, UPLOAD_DEADLINE_S).evaluations.create(tagged)


get_evaluation = task_of(evaluations.get_evaluation)
list_evaluations = task_of(evaluations.list_evaluations)
list_evaluation_results = task_of_pages(Evaluations.iterate_results)
