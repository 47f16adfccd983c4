"""Counts the steps that a run needs when only the second of three turns earns a reward.

Each seed trains the quickstart's model twice: once with the reward of a turn where it is earned,
once with the sum for all turns of the episode, as GRPO has it.

    python -m slipstream.learner.trainer.tiny_model models/tiny
    python -m benchmarks.asynchrony.turn_rewards --seeds 5

Prints one table and writes benchmarks/results/turn-rewards.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import measure

# The reward of a run is told over so many steps, since that of one step is noisy.
WINDOW = 5
METRIC = "turns/second"
WAYS = {
    "by turn": ['algorithm.advantage="return_to_go"', "algorithm.advantage_args={gamma=0}"],
    "summed": ['algorithm.advantage="grpo"'],
}


def rewards_of(way: str, seed: int, arguments: argparse.Namespace) -> list[float]:
    """Trains one run; returns the mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"run.seed={seed}",
            f"run.steps={arguments.steps}",
            f'run.dir="{folder}"',
            'run.name="turns"',
            f'model.path="{arguments.model.resolve()}"',
            'environments=[{name="turns", reference="support.fakes.three_turns:ThreeTurns", '
            f"args={{noise={arguments.noise}}}}}]",
            "evaluations=[]",
            "sampling.max_episode_tokens=48",
            f"algorithm.group_size={arguments.group_size}",
            f"algorithm.groups_per_step={arguments.groups}",
            "learner.export_final=false",
            *WAYS[way],
        ]
        config = str(measure.ROOT / "deploy/configs/quickstart.toml")
        command = [sys.executable, "-m", "slipstream.client.cli", "run", config, *settings]
        paths = [str(measure.ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        subprocess.run(command, env=environ, check=True, capture_output=True, timeout=1500)
        rows = (Path(folder) / "turns" / "metrics.jsonl").read_text().splitlines()
    measure.progress(f"{way}, seed {seed}")
    return [float(json.loads(row)[METRIC]) for row in rows]


def steps_to(rewards: list[float], bound: float) -> int | None:
    """Returns the first step by which the mean of the last WINDOW rewards reached `bound`."""
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[end - WINDOW : end]) >= bound:
            return end
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", type=float, default=1.0, help="what other turns earn by chance")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--bound", type=float, default=0.5, help="the reward to be reached")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--model", type=Path, default=measure.ROOT / "models/tiny")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    jobs = [(way, seed) for seed in range(arguments.seeds) for way in WAYS]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rewards = dict(
            zip(
                jobs, pool.map(lambda job: rewards_of(job[0], job[1], arguments), jobs), strict=True
            )
        )
    needed = {
        way: [steps_to(rewards[way, seed], arguments.bound) for seed in range(arguments.seeds)]
        for way in WAYS
    }
    rows = [
        [way, ", ".join(f"more than {arguments.steps}" if n is None else str(n) for n in found)]
        for way, found in needed.items()
    ]
    table = measure.table(["reward", f"steps to a reward of {arguments.bound}, by seed"], rows)
    record = {
        "settings": measure.settings_of(arguments),
        "table": table,
        "rewards": {f"{way}, seed {seed}": found for (way, seed), found in rewards.items()},
    }
    measure.write_result("turn-rewards", record, arguments.out)
    print("\n".join(table))


if __name__ == "__main__":
    main()
