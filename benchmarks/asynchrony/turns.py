r"""What the advisor predicts of whole runs in turns on one device, beside what they do.

The work is that of `whole_systems`, all replies of lognormal lengths, in runs one after the other.
A run's prediction after `--known` steps is compared with the steps that follow.

    python -m benchmarks.asynchrony.turns --out FOLDER/turns.json      # one GPU, 8 minutes
    python -m benchmarks.asynchrony.turns --device cpu --sequences 16 --group 4 --episodes 16

Writes benchmarks/results/turns.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.measure import part, progress, settings_of, table, write_result
from benchmarks.common.shapes import make_apart
from benchmarks.whole_systems.setup import START_LIMIT_S, System, our_config, work_of

# Metrics whose means the table has.
SHOWN = ("training_s", "groups_wait_s", "publish_s", "servers_paused_share")


def measure(arguments: argparse.Namespace, model: Path, folder: Path, turns: str) -> dict[str, Any]:
    """Returns predicted and measured steps per second of one run."""
    folder.mkdir()
    name = "ours" if turns == "off" else f"ours-{turns}"
    rows_path = folder / name / "metrics.jsonl"
    system = System(name, folder, arguments.staleness, rows_path, work_of(arguments, 0), 0, 0)
    (folder / "config.toml").write_text(our_config(arguments, system, model))
    system.gate.touch()
    config = str(folder / "config.toml")
    system.start([sys.executable, "-m", "slipstream.client.cli", "run", config], {})
    try:
        system.until(lambda: bool(system.rows()), "the first step", START_LIMIT_S)
        reached = arguments.steps + 1
        system.until(lambda: len(system.rows()) >= reached, f"{reached} steps", arguments.run_s)
        rows = system.rows()
    finally:
        system.end()
    known, rest = rows[arguments.known], rows[arguments.known + 1 :]
    measured = len(rest) / sum(row["step_s"] for row in rest)
    found = {"predicted": known["predicted_steps_per_s"], "measured": measured}
    found["error"] = found["predicted"] / measured - 1
    for metric in SHOWN:
        found[metric] = statistics.fmean(row.get(metric) or 0.0 for row in rest)
    progress(f"{turns}: {found}")
    return found


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", nargs="+", default=["pause", "off", "sleep"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--known", type=int, default=25, help="steps before the prediction")
    parser.add_argument("--sequences", type=int, default=128, help="of a step")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=256, help="under way")
    parser.add_argument("--staleness", type=int, default=4)
    parser.add_argument("--run-s", type=float, default=200.0, help="limit of one run's steps")
    parser.add_argument("--memory", type=float, default=0.4, help="GPU memory of the engine")
    parser.add_argument("--kv-gib", type=int, default=20, help="of it for its KV cache")
    parser.add_argument("--micro-tokens", type=int, default=25600)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.systems = arguments.turns
    on_cpu, runs, failures = arguments.device == "cpu", {}, dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape, dtype = ("tiny", "float32") if on_cpu else (arguments.shape, "bfloat16")
        model = make_apart(folder / "model", shape, dtype=dtype)
        for turns in arguments.turns:
            with part(turns, failures):
                runs[turns] = measure(arguments, model, folder / turns, turns)
            record = {"settings": settings_of(arguments), "runs": runs, "failures": failures}
            write_result("turns", record, arguments.out)
    header = ["turns", "predicted, steps/s", "measured", "error", *SHOWN]
    lines = [
        [turns, *(f"{run[name]:.3g}" for name in ("predicted", "measured")), f"{run['error']:+.1%}"]
        + [f"{run[name]:.3g}" for name in SHOWN]
        for turns, run in runs.items()
    ]
    print("\n".join([*table(header, lines), *(f"FAILED: {name}" for name in failures)]))


if __name__ == "__main__":
    main()
