"""tuneship as a collection of Prefect: a block of credentials, and a task for each operation of the API.

Prefect finds it by the entry point `prefect.collections` in every environment that has the distribution `tuneship`.

    from tuneship.prefect import TuneshipCredentials
    from tuneship.prefect.tasks import create_job
    from tuneship.prefect.waits import wait_for_job

    @flow
    def tune(dataset_id: str) -> str | None:
        service = TuneshipCredentials.load("default")
        wanted = JobCreate(base_model="tuneship-tiny", dataset_id=dataset_id, model_name="notes")
        job = create_job(wanted, credentials=service)
        return wait_for_job(job.id, credentials=service).fine_tuned_model

The service's own process never loads it, and it loads neither the service nor torch.
"""

from tuneship.prefect.credentials import TuneshipCredentials

__all__ = ["TuneshipCredentials"]
