"""The confirmed splits of a rollout, which its result, its pictures and its tables show. Pure."""

from datetime import datetime

from pydantic import BaseModel

from tuneship.gates.record import RolloutRecord, SplitConfirmed, SplitIntended


class Change(BaseModel):
    """One confirmed split; `at` is the service's time, null if unknown."""

    at: datetime | None
    weights: dict[str, int]
    why: str


def history_of(record: RolloutRecord) -> list[Change]:
    """Every confirmed split of a record, each with the reason of the change that led to it."""
    plan = record.begun.plan
    why, history = "", list[Change]()
    for fact in record.facts:
        if isinstance(fact, SplitIntended):
            why = fact.why
        elif isinstance(fact, SplitConfirmed):
            weights = {
                plan["baseline_deployment_id"]: 100 - fact.candidate_weight,
                plan["candidate_deployment_id"]: fact.candidate_weight,
            }
            history.append(Change(at=fact.at, weights=weights, why=why))
    return history
