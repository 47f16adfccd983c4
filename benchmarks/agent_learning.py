"""Lets the tiny model learn the quickstart's task as an environment and as an agent, in turns.

    python benchmarks/agent_learning.py --repeats 3

The agent (echo_agent.py) calls the model through OpenAI's client. Tasks, judge, settings and steps
are equal; each repeat has a seed of its own, and both kinds run with it one after the other. Prints
one table and writes benchmarks/results/agent_learning.json. A repeat takes about ten minutes on
two cores, most of them the agent's. With `--folder` the runs stay there, and the same command goes
on where it was cut off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Spread, note, progress, table, write_result
from quickstart_runs import Run, finished_run, make_model, run_quickstart

NAME = "agent_learning"
HERE = Path(__file__).resolve().parent
WARM_UP = 10
AGENT = (
    "environments.0.reference=echo_agent:EchoAgent",
    "evaluations.0.reference=echo_agent:EchoAgent",
    # To import OpenAI's client takes seconds, and longer on a busy machine.
    "environments.0.timeout_s=120",
    "evaluations.0.timeout_s=120",
)
KINDS: dict[str, tuple[str, ...]] = {"environment": (), "agent": AGENT}


def figures(run: Run) -> dict[str, Any]:
    """Returns the held-out rewards by step, and the speed after the first `WARM_UP` steps."""
    heldout = {row["evaluation_step"]: row["reward_heldout"] for row in run.evaluations}
    measured = run.rows[WARM_UP:]
    seconds = measured[-1]["wall_s"] - run.rows[WARM_UP - 1]["wall_s"]
    return {
        "heldout": heldout,
        "last": heldout[max(heldout)],
        "tokens_per_s": sum(row["trained_tokens"] for row in measured) / seconds,
        "wall_s": run.rows[-1]["wall_s"],
        "difference": run.summary["ledger"]["difference"],
    }


def measure(
    folder: Path,
    repeats: int,
    steps: int,
    *,
    start: Callable[..., Run] = run_quickstart,
) -> dict[str, list[dict[str, Any]]]:
    """Makes the runs that are not finished in `folder`, and returns the figures of all of them."""
    if not (folder / "model").exists():
        make_model(folder)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for repeat in range(repeats):
        for kind, overrides in KINDS.items():
            name = f"{kind}-{repeat}"
            settings = [f"run.seed={repeat + 1}", f"run.steps={steps}", *overrides]
            run = finished_run(folder, name)
            if run is None or len(run.rows) < steps:
                # The agent lies beside this file.
                run = start(folder, name, settings, cwd=HERE)
            found[kind].append(figures(run))
            note(NAME, {"kind": kind, **found[kind][-1]})
            progress(f"{kind}, repeat {repeat}: {found[kind][-1]}")
    return found


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, got {arguments.steps}")
    with tempfile.TemporaryDirectory() as name:
        found = measure(arguments.folder or Path(name), arguments.repeats, arguments.steps)
    rows = [
        [
            kind,
            Spread.of([one["last"] for one in runs]).text(3),
            Spread.of([one["tokens_per_s"] for one in runs]).text(0),
            Spread.of([one["wall_s"] for one in runs]).text(0),
        ]
        for kind, runs in found.items()
    ]
    lines = table(["kind", "held-out reward", "tokens/s", "s"], rows)
    print("\n".join(lines))
    write_result(NAME, {"steps": arguments.steps, "runs": found, "table": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
