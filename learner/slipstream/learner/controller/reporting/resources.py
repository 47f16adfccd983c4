"""The resources that a run used, from the rows of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import JsonValue

# Stages of the trainer whose seconds are summed over all steps.
STAGES = ("training", "waiting", "publish", "export")
# Values of which the largest of all steps counts.
PEAKS = ("trainer_rss_bytes", "gpu_reserved_bytes", "rollout_rss_bytes")


class RunResources:
    """Totals and peaks over the steps that were added."""

    def __init__(self) -> None:
        self._totals = dict.fromkeys((*(f"{stage}_s" for stage in STAGES), "model_flops"), 0.0)
        self._peaks: dict[str, float] = {}
        self._servers = 0

    def add(self, row: Mapping[str, float]) -> None:
        """Adds the row of one step."""
        for name in self._totals:
            value = row.get(name, 0.0)
            self._totals[name] += 0.0 if math.isnan(value) else value
        for name in PEAKS:
            # The comparison leaves out numbers that are none.
            if (value := row.get(name, math.nan)) >= self._peaks.get(name, 0.0):
                self._peaks[name] = value
        if (servers := row.get("servers_serving", 0.0)) > self._servers:
            self._servers = int(servers)

    def told(self, *, trainer_ranks: int) -> dict[str, JsonValue]:
        """The numbers by name, without peaks that no row had."""
        return {
            "trainer_ranks": trainer_ranks,
            "rollout_servers": self._servers,
            **self._totals,
            **self._peaks,
        }
