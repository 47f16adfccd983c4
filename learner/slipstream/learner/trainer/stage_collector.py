"""The seconds of the trainer's stages as Prometheus metrics, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from slipstream.learner.trainer.step import StageTimes


class StageCollector:
    """See `prometheus_client.registry.Collector`; runs in a thread of its own."""

    def __init__(self) -> None:
        # None while the model is loaded.
        self.stages: StageTimes | None = None

    def collect(self) -> Iterator[Metric]:
        """Yields the seconds of all stages, that of a stage under way included."""
        family = CounterMetricFamily(
            "slipstream_trainer_stage_seconds",
            "Time of rank 0 in a stage; the rest is training. Waiting is for orders.",
            labels=["stage"],
        )
        for stage, seconds in sorted((self.stages.totals() if self.stages else {}).items()):
            family.add_metric([stage], seconds)
        yield family
