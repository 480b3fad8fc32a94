"""Models: read one, and import one that was trained elsewhere, to release it by `model:` of a release's parameters."""

from pathlib import Path

from prefect import task

from tasks.create_once import CREATES, once
from tuneship.contract import models
from tuneship.contract.models import Model, ModelImport
from tuneship.prefect.connection import UPLOAD_DEADLINE_S
from tuneship.prefect.tasks import task_of


@task(**CREATES, task_run_name="import-{folder.name}")
def import_model(folder: Path, adapter: ModelImport, run_key: str) -> Model:
    """Import a peft directory; the service loads it before it accepts it."""
    client = once(run_key, "import", [adapter.name, adapter.base_model], UPLOAD_DEADLINE_S)
    return client.models.import_(adapter, folder)


get_model = task_of(models.get_model)
