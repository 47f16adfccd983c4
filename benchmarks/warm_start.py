"""Trains the quickstart's task with and without demonstrations before the rewards.

    python benchmarks/warm_start.py

The first run learns from demonstrations of the training tasks; the second goes on from its model
with rewards; the third has the same rewards and random weights. Prints one table and writes
benchmarks/results/warm_start.json. Takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measure import progress, table, write_result
from quickstart_runs import Run, make_model, run_quickstart
from slipstream.environments.echo import split_pairs

NAME = "warm_start"
SUPERVISED = [
    "environments.0.name=demonstrations",
    "environments.0.reference=slipstream.environments.demonstrations:Demonstrations",
    "algorithm.group_size=1",
    "algorithm.groups_per_step=128",
    "algorithm.advantage=score",
    "algorithm.loss=reinforce",
    "learner.export_final=true",
]


def write_demonstrations(path: Path) -> None:
    """Writes the right reply to every training task of the quickstart."""
    with path.open("w") as file:
        for first, second in split_pairs(12, seed=0)[0]:
            pair = f"{first} {second}"
            messages = [
                {"role": "user", "content": pair},
                {"role": "assistant", "content": f"{pair} {pair}"},
            ]
            print(json.dumps({"messages": messages}), file=file)


def heldout(run: Run) -> dict[int, float]:
    """Returns the rewards held out, by step."""
    return {row["evaluation_step"]: row["reward_heldout"] for row in run.evaluations}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--supervised", type=int, default=30, metavar="STEPS")
    parser.add_argument("--rewarded", type=int, default=60, metavar="STEPS")
    arguments = parser.parse_args()
    every = ["evaluations.0.every_steps=10"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        write_demonstrations(folder / "demonstrations.jsonl")
        given = [
            *SUPERVISED,
            f'environments.0.args={{ path = "{folder}/demonstrations.jsonl" }}',
            f"run.steps={arguments.supervised}",
        ]
        rewarded = [*every, f"run.steps={arguments.rewarded}"]
        first = run_quickstart(folder, "supervised", [*every, *given])
        progress(f"demonstrations: {heldout(first)}")
        start = f"model.path={folder}/supervised/checkpoints/final"
        second = run_quickstart(folder, "warm", [*rewarded, start])
        progress(f"then rewards: {heldout(second)}")
        third = run_quickstart(folder, "cold", rewarded)
        progress(f"rewards alone: {heldout(third)}")
    found = {
        "demonstrations": heldout(first),
        "then rewards": heldout(second),
        "rewards alone": heldout(third),
    }
    steps = sorted({step for by in found.values() for step in by})
    rows = [
        [kind, *(f"{by[step]:.3f}" if step in by else "" for step in steps)]
        for kind, by in found.items()
    ]
    lines = table(["held-out reward", *(f"step {step}" for step in steps)], rows)
    print("\n".join(lines))
    write_result(NAME, {"heldout": found, "settings": SUPERVISED, "table": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
