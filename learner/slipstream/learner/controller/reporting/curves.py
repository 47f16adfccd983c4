"""Draws the curves of a run: reward, lag and throughput over steps."""

from __future__ import annotations

import io
from array import array
from collections.abc import Sequence
from pathlib import Path

from slipstream.learner.controller.evaluations.evaluation import EvaluationResult
from slipstream.learner.controller.reporting.rows import COLUMNS, read_rows


def draw_curves(title: str, metrics: Path, evaluations: Sequence[EvaluationResult]) -> bytes:
    """Draws a PNG with three panels; works on any thread and blocks for a moment.

    `metrics` is the file with a row for each step. Returns empty bytes when it has no step.
    ProtocolError or OSError when the file cannot be read.
    """
    columns = {name: array("d") for name in COLUMNS}
    for row in read_rows(metrics):
        if "step" in row:
            for name, column in columns.items():
                column.append(row[name])
    if not columns["step"]:
        return b""
    # pyplot is not used because its figures belong to one thread.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = columns["step"]
    figure = Figure(figsize=(8, 8))
    rewards, lags, speeds = figure.subplots(3, 1, sharex=True)
    # Fixed margins: searching the best margins takes longer than drawing.
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.07, top=0.95, hspace=0.1)
    rewards.plot(steps, columns["reward_mean"], label="training")
    if evaluations:
        rewards.plot(
            [result.step for result in evaluations],
            [result.reward_mean for result in evaluations],
            "o--",
            label="held out",
        )
    rewards.set_ylabel("reward")
    rewards.legend(loc="lower right")
    lags.plot(steps, columns["lag_mean"], label="mean")
    lags.plot(steps, columns["lag_max"], label="largest", alpha=0.6)
    lags.set_ylabel("lag (versions)")
    lags.legend(loc="best")
    speeds.plot(steps, columns["generated_tokens_per_s"], label="generated")
    speeds.plot(steps, columns["trained_tokens_per_s"], label="trained", alpha=0.7)
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("version")
    speeds.legend(loc="best")
    for panel in (rewards, lags, speeds):
        panel.grid(alpha=0.3)
    speeds.xaxis.set_major_locator(MaxNLocator(integer=True))
    rewards.set_title(title)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    return picture.getvalue()
