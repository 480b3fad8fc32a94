"""One evaluation: its verdict in a sentence, what each grader and each slice say, and the lines that were lost."""

from dataclasses import dataclass

from tuneship.contract.common import EvaluationId
from tuneship.contract.evaluations import OPEN, Evaluation, GraderReport, SliceReport
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

LOSSES_SHOWN = 50


@dataclass(frozen=True)
class EvaluationView:
    """An evaluation, with its slices from the worst difference on, and lines that only the baseline had right."""

    evaluation: Evaluation
    is_open: bool
    tested: list[SliceReport]
    untested: list[SliceReport]
    lost_lines: list[int]

    @property
    def _scores(self) -> list[GraderReport]:
        # A loss is in nats, and has no place among points.
        return [one for one in self.evaluation.graders if one.measure == "score"]

    @property
    def reach(self) -> float:
        """The largest difference, for the axis of the picture: whole intervals fit between -reach and +reach."""
        ends = [
            abs(end)
            for one in (*self._scores, *self.tested)
            for end in (one.low, one.high)
            if end is not None
        ]
        return max([*ends, 2 * self.evaluation.settings.margin])

    def at(self, difference: float) -> float:
        """The place of a difference in the picture, from 0 to 100."""
        return round(50 + 50 * difference / self.reach, 2)


@page("/console/evaluations/{evaluation_id}")
async def evaluation(client: PageClient, evaluation_id: EvaluationId) -> EvaluationView:
    """Lost examples by line number only: no text is stored."""
    found = await client.evaluations.get(evaluation_id)
    lost = await client.evaluations.results(evaluation_id, limit=LOSSES_SHOWN, outcome="loss")
    tested = [one for one in found.slices if one.verdict != "not_tested"]
    return EvaluationView(
        found,
        found.status in OPEN,
        sorted(tested, key=lambda one: one.difference or 0.0),
        [one for one in found.slices if one.verdict == "not_tested"],
        sorted(one.line for one in lost.results),
    )
