"""Lets the tiny model learn the quickstart's task as an environment and as an agent, in turns.

    python benchmarks/agent_learning.py --repeats 3

The agent (echo_agent.py) calls the model through OpenAI's client, and once more over a bare socket,
which shows what that client costs. Tasks, judge, settings and steps are equal; each repeat has a
seed of its own, and all kinds run with it one after the other. The processor time is that of all
processes of a run, with their start; it is missing where a run was cut off. Prints one table and
writes benchmarks/results/agent_learning.json. A repeat takes about ten minutes on two cores. With
`--folder` the runs stay there, and the same command goes on where it was cut off.
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
# Each of the 26 pairs that are held out, so often that their mean says something.
EVALUATION = ("evaluations.0.num_episodes=520", "evaluations.0.samples_per_task=20")


def agent(name: str) -> tuple[str, ...]:
    """Returns the settings with which an agent of echo_agent.py takes the place of the task."""
    both = ("environments.0", "evaluations.0")
    references = [f"{section}.reference=echo_agent:{name}" for section in both]
    # To import OpenAI's client takes seconds, and longer on a busy machine.
    return *references, *(f"{section}.timeout_s=120" for section in both)


KINDS: dict[str, tuple[str, ...]] = {
    "environment": (),
    "agent": agent("EchoAgent"),
    "bare": agent("BareAgent"),
}


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
        "step_cpu_s": None if run.cpu_s is None else run.cpu_s / len(run.rows),
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
            settings = [f"run.seed={repeat + 1}", f"run.steps={steps}", *EVALUATION, *overrides]
            run = finished_run(folder, name)
            if run is None or len(run.rows) < steps:
                # The agent lies beside this file.
                run = start(folder, name, settings, cwd=HERE)
            found[kind].append(figures(run))
            note(NAME, {"kind": kind, **found[kind][-1]})
            progress(f"{kind}, repeat {repeat}: {found[kind][-1]}")
    return found


def step_cpu_s(runs: list[dict[str, Any]]) -> str:
    """Returns the processor time of a step in the runs that were not cut off."""
    known = [one["step_cpu_s"] for one in runs if one["step_cpu_s"] is not None]
    return Spread.of(known).text(2) if known else "-"


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
            step_cpu_s(runs),
        ]
        for kind, runs in found.items()
    ]
    header = ["kind", "held-out reward", "tokens/s", "s", "processor time of a step, s"]
    lines = table(header, rows)
    print("\n".join(lines))
    write_result(NAME, {"steps": arguments.steps, "runs": found, "table": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
