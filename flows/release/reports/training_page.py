"""The jobs' losses while they train, on the run's page: a table and the curves, written again at each evaluation.

Numbers only. Next: `flows/release/reports/plots.py` draws, `tasks/jobs.py` polls.
"""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows.release.loss_limits import Limit
from tuneship.cards.markdown import number, table
from tuneship.contract.reports.job_reports import JobMetrics
from tuneship.gates.reports.curves import evaluations


class TrainingPage:
    """The page of the jobs that train."""

    def __init__(self, limits: Sequence[Limit]) -> None:
        """Draw `limits` into each picture."""
        self._limits = limits
        self._known: dict[str, JobMetrics] = {}
        self._evaluations: dict[str, int] = {}

    def show(self, running: Mapping[str, JobMetrics]) -> None:
        """Write the page when a model was evaluated again; never fails the training."""
        seen = {job_id: len(evaluations(metrics)) for job_id, metrics in running.items()}
        self._known |= running
        if all(self._evaluations.get(job_id, 0) >= count for job_id, count in seen.items()):
            return
        self._evaluations |= seen
        try:
            create_markdown_artifact(self.page(), key="training", description="Losses so far")
        except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the training matters more
            get_run_logger().warning("the page was not written (%s)", type(error).__name__)

    def page(self) -> str:
        """The page as Markdown with its pictures embedded."""
        from flows.release.reports.plots import plot_losses  # noqa: PLC0415 - starts slowly

        rows: list[list[str]] = []
        for job_id, metrics in self._known.items():
            losses = [x for x in metrics.validation_loss if x is not None and math.isfinite(x)]
            series = (metrics.steps, metrics.epochs, metrics.training_loss, losses)
            cells = [number(values[-1]) if values else "-" for values in series]
            rows.append([job_id, *cells, number(min(losses)) if losses else "-"])
        pictures: list[str] = []
        with TemporaryDirectory() as folder:
            file = Path(folder) / "loss.png"
            for job_id, metrics in self._known.items():
                if metrics.steps:
                    plot_losses(metrics, self._limits, file)
                    picture = b64encode(file.read_bytes()).decode()
                    # Embedded, because the UI cannot reach a file of this machine.
                    pictures.append(f"![Losses of {job_id}](data:image/png;base64,{picture})")
        titles = ("job", "step", "epoch", "training loss", "validation loss", "lowest")
        return "\n\n".join([table(titles, rows), *pictures]) + "\n"
