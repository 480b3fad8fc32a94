"""The samples of one scrape, in the form that `prometheus_client` renders."""

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tuneship.metrics.columns import EDGES_MS, histogram_of
from tuneship.service.monitoring.metric_list import MetricKind

EDGES = tuple(str(edge / 1000) for edge in EDGES_MS)


class Scrape(Collector):
    """Collects the samples of the listed metrics; `others` are the collectors of libraries."""

    def __init__(self, others: Sequence[Collector] = ()) -> None:
        """Start without samples."""
        self._families: dict[str, Metric] = {}
        self._others = others

    def add(self, metric: MetricKind, value: float, *labels: str) -> None:
        """Add a sample of a counter or a gauge; `labels` are the values, in the order of the metric's names."""
        family = self._family(metric)
        family.add_sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value)

    def add_sketch(
        self, metric: MetricKind, sketch: Mapping[int, int], sum_ms: float, *labels: str
    ) -> None:
        """Add a histogram with the edges of the published one, from a sketch of milliseconds."""
        self.add_histogram(metric, EDGES, histogram_of(sketch), sum_ms / 1000, *labels)

    def add_histogram(
        self,
        metric: MetricKind,
        edges: Sequence[str],
        counts: Sequence[int],
        seconds: float,
        *labels: str,
    ) -> None:
        """Add a histogram; `counts` are cumulative and end with the number of all values."""
        family = self._family(metric)
        given = dict(zip(metric.labels, labels, strict=True))
        for edge, count in zip((*edges, "+Inf"), counts, strict=True):
            family.add_sample(f"{metric.name}_bucket", {**given, "le": edge}, count)
        family.add_sample(f"{metric.name}_count", given, counts[-1])
        family.add_sample(f"{metric.name}_sum", given, seconds)

    def _family(self, metric: MetricKind) -> Metric:
        family = self._families.get(metric.name)
        if family is None:
            name = metric.name.removesuffix("_total")
            family = Metric(name, metric.meaning, metric.kind)
            self._families[metric.name] = family
        return family

    def collect(self) -> Iterable[Metric]:
        """All samples of a scrape, by metric."""
        yield from self._families.values()
        for other in self._others:
            yield from other.collect()
