"""Lists the users of a base model: jobs that have not ended, tuned models, and deployments that are not deleted."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import sqlalchemy as sa

from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.jobs import ALIVE
from tuneship.store.database.tables import deployments, jobs, models

# Prefix of the id of every tuned model: `ft:<base>:<name>:<suffix>`.
TUNED = "ft:"


@dataclass(frozen=True)
class BaseModelUsers:
    """The ids of one base model's users, of all tenants."""

    jobs: list[str] = field(default_factory=list[str])
    models: list[str] = field(default_factory=list[str])
    deployments: list[str] = field(default_factory=list[str])

    @property
    def all(self) -> list[str]:
        """Every id: deployments, jobs, then tuned models."""
        return [*self.deployments, *self.jobs, *self.models]


def users_of_base_models(connection: sa.Connection) -> Mapping[str, BaseModelUsers]:
    """The users of each base model that has any, by its id."""
    found = defaultdict[str, BaseModelUsers](BaseModelUsers)
    alive = sa.select(jobs.c.id, jobs.c.base_model).where(jobs.c.status.in_(ALIVE))
    for identifier, base in connection.execute(alive.order_by(jobs.c.id)):
        found[base].jobs.append(identifier)
    tuned = sa.select(models.c.id, models.c.base_model).order_by(models.c.id)
    for identifier, base in connection.execute(tuned):
        found[base].models.append(identifier)
    live = deployments.c.status != DeploymentStatus.DELETED
    served = sa.select(deployments.c.id, deployments.c.model_name).where(live)
    for identifier, model in connection.execute(served.order_by(deployments.c.id)):
        base = model.split(":")[1] if model.startswith(TUNED) else model
        found[base].deployments.append(identifier)
    return dict(found)
