"""The figures of whole systems side by side, from the rows of their steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.measure import Spread, table
from benchmarks.whole_systems.setup import System

TARGET = 3.0
# What a step's time goes to, by the names of the systems.
PARTS = {
    "training_s": "training",
    "waiting_s": "waiting",
    "publish_s": "publish",
    "pause_s": "engine's pause",
    "generated_tokens_per_s": "generated tokens/s",
    "lag_mean": "lag",
    "generate_s": "generation",
    "sync_s": "weights",
    "rest_s": "all else",
    "perf/fwd_bwd_s": "forward and backward",
    "perf/optimizer_s": "optimizer",
    "perf/rollout_wait_s": "waiting",
    "perf/weight_sync_s": "weights",
    "rollout/generated_tok_s": "generated tokens/s",
    "sample/staleness_mean": "lag",
    "sample/dropped_stale_total": "dropped in each step that drops",
}


def windows(system: System) -> dict[str, list[dict[str, Any]]]:
    """Returns the steps that count, by lengths: whole windows.

    A synchronous system settles in one step. The replies that an asynchronous one makes during its
    first, slow step last for a window more, and replies of the next lengths begin a window early.
    Replies of the first lengths come later than that when a server began them late.
    """
    rows = system.rows()
    ahead = system.ahead
    window = system.window("fixed")
    last = system.window("lognormal")
    settle = 2 * window if ahead else 1
    fixed = system.fixed_steps
    tokens = system.work.tokens * (system.work.fixed // fixed)
    last_fixed = max((row["step"] for row in rows if row["trained_tokens"] == tokens), default=0)
    first_lognormal = max(fixed, last_fixed) + last
    whole = (fixed - (window if ahead else 0) - settle) // window * window
    equal = [row for row in rows if settle < row["step"] <= settle + whole]
    chosen = {"fixed": equal[: len(equal) // window * window]}
    rest = [row for row in rows if row["step"] > first_lognormal]
    chosen["lognormal"] = rest[: len(rest) // last * last]
    return {lengths: each for lengths, each in chosen.items() if each}


def fewest_fixed_steps(system: System) -> int:
    """Returns the steps with replies of one length behind which `windows` has one of them."""
    return 4 * system.window("fixed") if system.ahead else 2


def figures(rows: Sequence[dict[str, Any]], size: int) -> dict[str, Any]:
    """Returns tokens and seconds of windows of `size` steps, and the mean of each part."""
    cut = [rows[first : first + size] for first in range(0, len(rows), size)]
    speeds = [sum(r["trained_tokens"] for r in w) / sum(r["step_s"] for r in w) for w in cut]
    found: dict[str, Any] = {
        "steps": [rows[0]["step"], rows[-1]["step"]],
        "tokens_per_step": sum(row["trained_tokens"] for row in rows) / len(rows),
        "step_s": sum(row["step_s"] for row in rows) / len(rows),
        "tokens_per_s": sum(r["trained_tokens"] for r in rows) / sum(r["step_s"] for r in rows),
        "windows": speeds,
    }
    for key in PARTS:
        values = [row[key] for row in rows if row.get(key) is not None]
        if values:
            found[key] = sum(values) / len(values)
    return found


def table_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Returns the table: medians of runs, spread of windows, ratios to the best peer."""
    header = ["system, lengths", "trained tokens/s (windows)", "ours over the best peer"]
    header += ["runs", "a step, s", "of it, means"]
    speeds = {row: Spread.of([run["tokens_per_s"] for run in found]) for row, found in runs.items()}
    rows: list[Sequence[object]] = []
    for row, found in sorted(runs.items(), key=lambda item: item[0].split(", ")[::-1]):
        name, lengths = row.split(", ")
        peers = [
            speeds[other].median
            for other in speeds
            if not other.startswith("ours") and other.endswith(f", {lengths}")
        ]
        ratio = ""
        if name.startswith("ours") and peers:
            ratio = f"{speeds[row].median / max(peers):.2f}"
        every = [speed for run in found for speed in run["windows"]]
        told = [
            f"{label} {Spread.of([run[key] for run in found]).median:,.2f}"
            for key, label in PARTS.items()
            if all(key in run for run in found)
        ]
        speed = f"{speeds[row].median:,.0f} ({min(every):,.0f}-{max(every):,.0f})"
        step = f"{Spread.of([run['step_s'] for run in found]).median:.2f}"
        rows.append([row, speed, ratio, len(found), step, ", ".join(told)])
    return table(header, [*rows, ["target", "", f"{TARGET:.1f}", "", "", ""]])
