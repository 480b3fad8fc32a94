"""The rows of evaluations and of their scores. Who answers the requests: `tuneship/service/evaluations/`.

Every change while an evaluation runs names the number of examples that it goes on from, so that none is counted twice,
whoever else may work on it.
"""

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.evaluations import OPEN, EvaluationStatus
from tuneship.store.database.rows import fetch_all
from tuneship.store.database.tables import (
    EvaluationRow,
    EvaluationScoresRow,
    evaluation_scores,
    evaluations,
)

PARTS_PER_QUERY = 100
# A page needs no more.
FIRST_PARTS = 4


def open_evaluations(connection: sa.Connection) -> Sequence[EvaluationRow]:
    """The evaluations of all clients that have not ended, oldest first."""
    query = sa.select(evaluations).where(evaluations.c.status.in_(OPEN))
    return fetch_all(connection, query.order_by(evaluations.c.created_at, evaluations.c.id))


def move(
    connection: sa.Connection,
    evaluation_id: str,
    before: Collection[EvaluationStatus],
    now: datetime,
    **values: Any,
) -> bool:
    """Change an evaluation that is in one of these states; returns whether it was."""
    is_there = (evaluations.c.id == evaluation_id) & evaluations.c.status.in_(before)
    change = sa.update(evaluations).where(is_there).values(updated_at=now, **values)
    return connection.execute(change).rowcount == 1


def advance(
    connection: sa.Connection,
    row: EvaluationRow,
    results: Sequence[dict[str, Any]],
    now: datetime,
    **values: Any,
) -> bool:
    """Store the scores of the examples after those of `row`; return False if another process has stored some."""
    change = (
        sa.update(evaluations)
        .where(
            evaluations.c.id == row["id"],
            evaluations.c.status == EvaluationStatus.RUNNING,
            evaluations.c.answered == row["answered"],
        )
        .values(updated_at=now, answered=row["answered"] + len(results), **values)
    )
    if connection.execute(change).rowcount != 1:
        return False
    if results:
        part = {"evaluation_id": row["id"], "position": row["answered"], "results": [*results]}
        connection.execute(sa.insert(evaluation_scores).values(part))
    return True


def results_of(
    connection: sa.Connection, evaluation_id: str, first: int = 0
) -> Iterator[dict[str, Any]]:
    """The scores of an evaluation's examples, in its order, from the one with the number `first` on."""
    return (one for _, one in numbered_results(connection, evaluation_id, first))


def numbered_results(
    connection: sa.Connection, evaluation_id: str, first: int, *, is_rising: bool = True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The numbers and scores of an evaluation's examples: from `first` on, or, unless `is_rising`, back from it."""
    position = evaluation_scores.c.position
    of_evaluation = sa.select(evaluation_scores).where(
        evaluation_scores.c.evaluation_id == evaluation_id
    )
    order = position if is_rising else position.desc()
    holds_first = (evaluation_scores.c.evaluation_id == evaluation_id) & (position <= first)
    begins = connection.scalar(sa.select(sa.func.max(position)).where(holds_first)) or 0
    rest, most = position >= begins if is_rising else position <= begins, FIRST_PARTS
    while True:
        query = of_evaluation.where(rest).order_by(order).limit(most)
        parts: list[EvaluationScoresRow] = fetch_all(connection, query)
        for part in parts:
            numbers = enumerate(part["results"], part["position"])
            for number, one in numbers if is_rising else reversed([*numbers]):
                if number >= first if is_rising else number <= first:
                    yield number, one
        if len(parts) < most:
            return
        last, most = parts[-1]["position"], PARTS_PER_QUERY
        rest = position > last if is_rising else position < last


def remove_results(connection: sa.Connection, evaluation_id: str) -> None:
    """Delete the scores of an evaluation."""
    connection.execute(
        sa.delete(evaluation_scores).where(evaluation_scores.c.evaluation_id == evaluation_id)
    )


def verdicts_on(connection: sa.Connection, client_id: str, dataset_sha256: str) -> int:
    """How many evaluations of a tenant have ended with a verdict on this content."""
    query = sa.select(sa.func.count()).where(
        evaluations.c.client_id == client_id,
        evaluations.c.dataset_sha256 == dataset_sha256,
        evaluations.c.verdict.is_not(None),
    )
    return int(connection.scalar(query) or 0)


def is_dataset_needed(connection: sa.Connection, dataset_id: str) -> bool:
    """Whether an evaluation that has not ended reads the dataset."""
    query = sa.select(evaluations.c.id).where(
        evaluations.c.dataset_id == dataset_id, evaluations.c.status.in_(OPEN)
    )
    return connection.execute(query.limit(1)).first() is not None
