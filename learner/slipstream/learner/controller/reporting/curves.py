"""Draws the curves of a run: reward, lag and throughput over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slipstream.learner.controller.evaluations.evaluation import EvaluationResult

Rows = Sequence[dict[str, float]]


def draw_curves(
    path: Path, title: str, rows: Rows, evaluations: Sequence[EvaluationResult]
) -> None:
    """Writes one picture with three panels, on any thread; blocks for a moment."""
    # Not pyplot, whose figures belong to one thread.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(8, 8))
    rewards, lags, speeds = figure.subplots(3, 1, sharex=True)
    # Looking for the best margins takes longer than drawing.
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.07, top=0.95, hspace=0.1)
    rewards.plot(steps, [row["reward_mean"] for row in rows], label="training")
    if evaluations:
        rewards.plot(
            [result.step for result in evaluations],
            [result.reward_mean for result in evaluations],
            "o--",
            label="held out",
        )
    rewards.set_ylabel("reward")
    rewards.legend(loc="lower right")
    lags.plot(steps, [row["lag_mean"] for row in rows], label="mean")
    lags.plot(steps, [row["lag_max"] for row in rows], label="largest", alpha=0.6)
    lags.set_ylabel("lag (versions)")
    lags.legend(loc="best")
    speeds.plot(steps, [row["generated_tokens_per_s"] for row in rows], label="generated")
    speeds.plot(steps, [row["trained_tokens_per_s"] for row in rows], label="trained", alpha=0.7)
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("version")
    speeds.legend(loc="best")
    for panel in (rewards, lags, speeds):
        panel.grid(alpha=0.3)
    speeds.xaxis.set_major_locator(MaxNLocator(integer=True))
    rewards.set_title(title)
    figure.savefig(path, dpi=110)
