"""Fine-tuning jobs: create them once for a release, and read them."""

from prefect import task

from tasks.create_once import CREATES, as_created, made_before, marks, once
from tuneship.contract import jobs
from tuneship.contract.jobs import JobCreate, JobCreated
from tuneship.prefect.connection import api
from tuneship.prefect.tasks import task_of


@task(**CREATES, task_run_name="create-job-{job.model_name}")
def create_job(job: JobCreate, run_key: str) -> JobCreated:
    """Queue a fine-tuning job, once for this run; one that it queued before is found by its tags."""
    create = (run_key, "create_job", job.model_dump(mode="json", exclude_defaults=True))
    tags = marks(*create)
    for made in made_before(api().jobs.iterate(limit=100, tags=tags), tags):
        return as_created(JobCreated, api().jobs.get(made.id))
    return once(*create).jobs.create(job.model_copy(update={"tags": {**job.tags, **tags}}))


get_job = task_of(jobs.get_job)
get_job_metrics = task_of(jobs.get_job_metrics)
