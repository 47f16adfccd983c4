"""Metrics of each process at /metrics, for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.core.extension import Extension

if TYPE_CHECKING:
    from slipstream.core.settings.tables import Tables


def _is_on(config: Tables) -> bool:
    return config.tracking.prometheus is not None


EXTENSION = Extension(
    name="prometheus",
    is_on=_is_on,
    checks="slipstream.extensions.prometheus.launch:CHECKS",
    controller="slipstream.extensions.prometheus.controller:MetricsPart",
    server="slipstream.extensions.prometheus.server:ServerMetricsPart",
)
