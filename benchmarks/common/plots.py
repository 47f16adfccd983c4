"""Draws the plots of docs/performance.md from the results in benchmarks/results.

    python -m benchmarks.common.plots

The same results and the same matplotlib give the same bytes; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from benchmarks.common.measure import RESULTS, ROOT  # noqa: E402

IMAGES = ROOT / "docs" / "images"
COLORS = {"ours": "#1f77b4", "peer": "#b0b7c3", "other": "#d8a14a", "limit": "#444444"}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "slipstream",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
SHAPES = {"0.6B": "learner-0.6B", "8B, 6 layers": "learner-8B-6", "8B, 20 layers": "learner-8B"}
PUBLISHES = {
    "0.6B, 1 server": "weight_broadcast-0.6B-1",
    "0.6B, 3 servers": "weight_broadcast-0.6B-3",
    "8B, 1 server": "weight_broadcast-8B-1",
    "8B, 3 servers": "weight_broadcast-8B-3",
}


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def training(axes: Axes) -> None:
    """Tokens per second of our step and of Megatron's own loops, by shape."""
    loops = {"slipstream": "ours", "bare": "peer", "pretrain": "other"}
    for place, name in enumerate(SHAPES.values()):
        turns = result(name)["turns"]
        for offset, (loop, color) in enumerate(loops.items()):
            if loop not in turns:
                continue
            rate = statistics.median(turn["tokens_per_s"] for turn in turns[loop])
            label = loop if place == 0 else None
            axes.bar(place + 0.27 * (offset - 1), rate, 0.25, color=COLORS[color], label=label)
    axes.set_xticks(range(len(SHAPES)), list(SHAPES))
    axes.set_ylabel("tokens/s")
    axes.set_title("Training step, one H200")
    axes.legend(frameon=False)


def asynchrony(axes: Axes) -> None:
    """Steps of asynchronous training over those of synchronous training, by `max_staleness`."""
    kinds = {"asynchrony-0.6B": "contexts kept", "asynchrony-0.6B-anew": "contexts computed anew"}
    for (name, label), color in zip(kinds.items(), ("ours", "other"), strict=True):
        shares = result(name)["shares"]
        bounds = sorted(shares, key=int)
        speeds = [shares[bound]["speedup"] for bound in bounds]
        axes.plot(list(map(int, bounds)), speeds, "o-", color=COLORS[color], label=label)
        ceiling = shares[bounds[-1]]["ceiling"]
        axes.axhline(ceiling, color=COLORS[color], linestyle=":", label=f"ceiling, {label}")
    axes.set_ylim(0)
    axes.set_xlabel("max_staleness")
    axes.set_ylabel("times the steps of synchronous training")
    axes.set_title("Asynchrony, two H200s, 0.6B")
    axes.legend(frameon=False, loc="lower right")


def pause(axes: Axes) -> None:
    """How long an engine stands still for new weights, beside the time on the wire."""
    bars = (("wire", "limit"), ("pause, idle", "ours"), ("pause, 256 requests", "other"))
    for place, name in enumerate(PUBLISHES.values()):
        ratios = result(name)["ratios"]
        idle, busy = (ratios[f"ours, {state}: pause_s"] * 1e3 for state in ("idle", "busy"))
        wire = idle / ratios["ours, idle: pause in wire times"]
        for offset, (height, (label, color)) in enumerate(
            zip((wire, idle, busy), bars, strict=True)
        ):
            shown = label if place == 0 else None
            axes.bar(place + 0.27 * (offset - 1), height, 0.25, color=COLORS[color], label=shown)
    axes.set_yscale("log")
    axes.set_ylim(1)
    axes.set_xticks(range(len(PUBLISHES)), list(PUBLISHES))
    axes.set_ylabel("ms, logarithmic")
    axes.set_title("Pause of an engine for new weights, H200s")
    axes.legend(frameon=False)


PLOTS = {"training": training, "asynchrony": asynchrony, "pause": pause}


def draw(folder: Path) -> None:
    for name, plot in PLOTS.items():
        with matplotlib.rc_context(STYLE):
            figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
            plot(axes)
            figure.savefig(folder / f"plot-{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the plots of docs/performance.md.")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the plots")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
