"""Shows whether the algorithms learn: each trains the quickstart's task from the same start.

All settings but those below are from deploy/configs/quickstart.toml. The task is to name the two
letters of the prompt: a random policy gets about 0.17, the best possible reward is 1.

    python benchmarks/algorithms.py

The reward over steps is that of the trained groups. Dynamic sampling (DAPO) leaves out groups that
all members solve, so its curve stays below its policy; compare by the held-out column.

Prints one table, writes benchmarks/results/algorithms.json, and draws the mean reward over steps
into docs/images/algorithms.png. `--algorithms` chooses others of `ALGORITHMS` than the first six.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from measure import write_result
from quickstart_runs import make_model, run_quickstart

HERE = Path(__file__).resolve().parent
IMAGE = HERE.parent / "docs" / "images" / "algorithms.png"
DEFAULT_NUMBER = 6
# The goal counts as reached when the mean reward over this many steps reaches it.
WINDOW = 5
GOAL = 0.9

# Overrides by name. Replies have four tokens, so ranges of ratios are wider than for long replies.
ALGORITHMS: dict[str, list[str]] = {
    "GRPO": [],
    "RLOO": ["algorithm.advantage=rloo", "algorithm.loss=reinforce"],
    "GSPO": [
        "algorithm.mini_batches=2",
        "algorithm.loss=gspo",
        "algorithm.aggregation=sequence_mean",
    ],
    "CISPO": [
        "algorithm.loss=cispo",
        "algorithm.clip_low=1.0",
        "algorithm.clip_high=3.0",
        "algorithm.ratio=behavior",
        "algorithm.correction.weight=none",
    ],
    "SAPO": [
        "algorithm.loss=sapo",
        "algorithm.mini_batches=2",
        "algorithm.aggregation=sequence_mean",
    ],
    "PPO": [
        "algorithm.mini_batches=2",
        "algorithm.advantage=gae",
        "critic.learning_rate=1e-3",
        "critic.warmup_steps=3",
    ],
    "Dr. GRPO": ["algorithm.advantage=dr_grpo", "algorithm.aggregation=fixed"],
    "REINFORCE++": ["algorithm.advantage=reinforce_pp", "algorithm.mini_batches=2"],
    "REINFORCE++ with baseline": [
        "algorithm.advantage=reinforce_pp_baseline",
        "algorithm.mini_batches=2",
    ],
    "DAPO": [
        "algorithm.mini_batches=2",
        "algorithm.clip_high=0.28",
        "algorithm.dynamic_sampling.enabled=true",
        # Once all members solve every group, no batch is left: run it with --steps 100.
        "algorithm.dynamic_sampling.max_filtered_batches=100",
    ],
    "GRPO, KL to the start": ["algorithm.kl.coefficient=0.001", "algorithm.kl.estimator=k2"],
}


def run_once(arguments: argparse.Namespace, name: str, folder: Path) -> dict[str, object]:
    """Trains with one algorithm; returns its rewards by step and the figures of its summary."""
    run_name = "".join(letter if letter.isalnum() else "-" for letter in name)
    run = run_quickstart(folder, run_name, [f"run.steps={arguments.steps}", *ALGORITHMS[name]])
    summary = run.summary
    return {
        "overrides": ALGORITHMS[name],
        "reward": [row["reward_mean"] for row in run.rows],
        "entropy": [row["entropy"] for row in run.rows],
        "clip_fraction": [row["clip_fraction"] for row in run.rows],
        "heldout_first": summary["reward_heldout_first"],
        "heldout": summary["reward_heldout"],
        "generated_tokens": summary["generated_tokens"],
        "filtered_groups": summary["filtered_groups"],
        "ledger_difference": summary["ledger"]["difference"],
        "wall_s": run.wall_s,
    }


def steps_to_goal(rewards: Sequence[float]) -> int | None:
    """Returns the steps until the mean of the newest `WINDOW` rewards reached `GOAL`, or None."""
    for end in range(WINDOW, len(rewards) + 1):
        if statistics.fmean(rewards[end - WINDOW : end]) >= GOAL:
            return end
    return None


def table(results: Mapping[str, dict]) -> list[str]:
    """Returns the lines of the table, one for each algorithm."""
    lines = [
        f"| algorithm | held out, before | after | training, last {WINDOW} | steps to {GOAL} "
        "| entropy at the end | generated tokens | minutes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        reached = steps_to_goal(result["reward"])
        lines.append(
            f"| {name} | {result['heldout_first']:.2f} | {result['heldout']:.2f} "
            f"| {statistics.fmean(result['reward'][-WINDOW:]):.2f} "
            f"| {reached if reached is not None else '-'} | {result['entropy'][-1]:.2f} "
            f"| {result['generated_tokens']:,} | {result['wall_s'] / 60:.1f} |"
        )
    return lines


def draw(path: Path, results: Mapping[str, dict]) -> None:
    """Draws the mean reward, smoothed over `WINDOW` steps, with the raw means faintly behind it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, result in results.items():
        rewards = result["reward"]
        smooth = [
            statistics.fmean(rewards[max(0, end - WINDOW) : end])
            for end in range(1, len(rewards) + 1)
        ]
        steps = range(1, len(rewards) + 1)
        (line,) = panel.plot(steps, smooth, label=name)
        panel.plot(steps, rewards, color=line.get_color(), alpha=0.2, linewidth=0.8)
    panel.set_xlabel("step")
    panel.set_ylabel("mean reward of the batch")
    panel.set_title("The quickstart's task, same start and learning rate")
    panel.grid(alpha=0.3)
    panel.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Runs the algorithms one after another; writes and prints their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = list(ALGORITHMS)
    parser.add_argument(
        "--algorithms", nargs="+", choices=names, default=names[:DEFAULT_NUMBER], metavar="NAME"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "algorithms.json")
    parser.add_argument("--image", type=Path, default=IMAGE)
    arguments = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_model(folder)
        for name in arguments.algorithms:
            results[name] = run_once(arguments, name, folder)
            print(f"# {table({name: results[name]})[-1]}", flush=True)
    lines = table(results)
    draw(arguments.image, results)
    write_result("algorithms", {"results": results, "table": lines}, arguments.out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
