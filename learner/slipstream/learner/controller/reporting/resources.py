"""What a run took, from the lines of its steps: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

# Times of the trainer that are told for each step.
STAGES = ("training", "waiting", "publish", "export")
# The largest value of any step is what the run needed.
PEAKS = ("trainer_rss_bytes", "gpu_reserved_bytes", "rollout_rss_bytes")


def run_resources(
    rows: Sequence[Mapping[str, float]], *, trainer_ranks: int
) -> dict[str, JsonValue]:
    """Totals and peaks over all steps; what no step told is left out."""
    totals: dict[str, JsonValue] = {
        f"{stage}_s": sum(row.get(f"{stage}_s", 0.0) for row in rows) for stage in STAGES
    }
    told = [name for name in PEAKS if any(name in row for row in rows)]
    return {
        "trainer_ranks": trainer_ranks,
        "rollout_servers": max((int(row.get("servers_serving", 0)) for row in rows), default=0),
        **totals,
        "model_flops": sum(row.get("model_flops", 0.0) for row in rows),
        **{name: max(row.get(name, 0.0) for row in rows) for name in told},
    }
