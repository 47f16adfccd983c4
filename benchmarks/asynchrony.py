"""How much faster a run is when its two fleets do not wait for each other, on two CPU cores.

The learner and the controller have one core, the rollout server the other. Lengths of replies are
lognormal. For each `max_staleness` the same number of steps is run; 0 is the synchronous
algorithm, the peer. The limit is the slower fleet alone: the time that it was busy in the
synchronous runs.

    python benchmarks/asynchrony.py --repeats 5

Prints one table and writes benchmarks/results/asynchrony.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import write_result
from slipstream.client import Environment, StepResult

HERE = Path(__file__).resolve().parent
LEARNER_CORE, ROLLOUT_CORE = 0, 1
WARMUP_STEPS = 2


class LognormalReplies(Environment[int]):
    """Prompts whose replies have lognormal lengths; the reward is the share of one letter."""

    def __init__(self, median: float, sigma: float, longest: int, seed: int = 0) -> None:
        """`sigma` is the standard deviation of the length's natural logarithm."""
        generator = random.Random(seed)
        drawn = (generator.lognormvariate(0.0, sigma) * median for _ in range(100_000))
        self._lengths = [max(1, min(longest, round(length))) for length in drawn]

    def tasks(self) -> range:
        """Numbers without a meaning: every episode draws its own length."""
        return range(1000)

    def reset(self, task: int) -> list[dict[str, str]]:
        """Draws the length of this episode anew: members of a group differ in it."""
        self.max_reply_tokens = self._lengths[random.randrange(len(self._lengths))]
        return [{"role": "user", "content": "a b"}]

    def step(self, reply: str) -> StepResult:
        """Any reply will do: nothing is to be learnt here."""
        words = reply.split()
        return StepResult(reward=words.count("a") / max(1, len(words)))


def config_text(arguments: argparse.Namespace, folder: Path, staleness: int, port: int) -> str:
    """The settings of one run."""
    return f"""
[run]
name = "r"
dir = "{folder}"
steps = {arguments.steps + WARMUP_STEPS}

[model]
path = "{folder}/model"
dtype = "float32"

[[environments]]
name = "lognormal"
reference = "asynchrony:LognormalReplies"
args = {{ median = {arguments.median}, sigma = {arguments.sigma}, longest = {arguments.longest} }}

[algorithm]
group_size = 8
groups_per_step = 8
max_staleness = {staleness}
learning_rate = 1e-5

[sampling]
max_reply_tokens = {arguments.longest}
max_episode_tokens = {arguments.longest + 8}
ignore_eos = true

[controller]
address = "127.0.0.1:{port}"

[learner]
micro_batch_tokens = 4096
threads = 1
export_final = false

[rollout_server]
max_episodes = 64
threads = 1
enforce_eager = true

[weights]
verify_every = 1000
"""


def make_model(arguments: argparse.Namespace, folder: Path) -> None:
    """A model that is large enough for both fleets to have work."""
    script = HERE.parent / "deploy" / "make_tiny_model.py"
    sizes = ["--num-layers", str(arguments.num_layers), "--hidden-size", str(arguments.hidden_size)]
    heads = ["--num-attention-heads", str(arguments.hidden_size // 32)]
    positions = ["--max-position-embeddings", "1024"]
    command = [sys.executable, str(script), str(folder / "model"), *sizes, *heads, *positions]
    subprocess.run(command, check=True, capture_output=True)


def run_once(arguments: argparse.Namespace, staleness: int, port: int) -> dict[str, float]:
    """Figures of one run, without its first steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(arguments, folder)
        path = folder / "config.toml"
        path.write_text(config_text(arguments, folder, staleness, port))
        slipstream = shutil.which("slipstream", path=Path(sys.executable).parent)
        assert slipstream is not None
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        learner = _start(LEARNER_CORE, [slipstream, "learner", str(path)], environ)
        server = _start(ROLLOUT_CORE, [slipstream, "rollout-server", str(path)], environ)
        try:
            if learner.wait(timeout=1200) != 0:
                raise SystemExit(
                    f"the run failed: {learner.stderr.read() if learner.stderr else ''}"
                )
            server.wait(timeout=120)
        finally:
            for process in (learner, server):
                process.terminate()
        rows = [json.loads(line) for line in (folder / "r/metrics.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "r/summary.json").read_text())
    return figures(rows, summary)


def figures(
    rows: Sequence[dict[str, float]], summary: dict[str, dict[str, float]]
) -> dict[str, float]:
    """Steps per minute after the warm-up, and what both fleets did meanwhile."""
    steps = len(rows) - WARMUP_STEPS
    wall_s = rows[-1]["wall_s"] - rows[WARMUP_STEPS - 1]["wall_s"]
    return {
        "steps_per_minute": 60 * steps / wall_s,
        "training_s_per_step": sum(row["training_s"] for row in rows[WARMUP_STEPS:]) / steps,
        "wall_s_per_step": wall_s / steps,
        "lag_mean": sum(row["lag_mean"] for row in rows[WARMUP_STEPS:]) / steps,
        "generation": summary["busy"]["generation"],
        "training": summary["busy"]["training"],
        "both": summary["busy"]["both"],
        "ledger_difference": summary["ledger"]["difference"],
    }


def _start(core: int, command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        cwd=HERE,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def table(results: dict[int, list[dict[str, float]]]) -> list[str]:
    """Medians over the repeats; the speed-up is against max_staleness 0 in the same session."""
    base = statistics.median(r["steps_per_minute"] for r in results[0])
    slower = max(
        statistics.median(r["generation"] * r["wall_s_per_step"] for r in results[0]),
        statistics.median(r["training_s_per_step"] for r in results[0]),
    )
    lines = [
        "| max_staleness | steps/min (min-max) | speed-up | lag | generation | training | both |",
        "|---|---|---|---|---|---|---|",
    ]
    for staleness, runs in results.items():
        speeds = sorted(run["steps_per_minute"] for run in runs)
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        lines.append(
            f"| {staleness} | {middle['steps_per_minute']:.1f} ({speeds[0]:.1f}-{speeds[-1]:.1f}) "
            f"| {middle['steps_per_minute'] / base:.2f} | {middle['lag_mean']:.2f} "
            f"| {middle['generation']:.0%} | {middle['training']:.0%} | {middle['both']:.0%} |"
        )
    lines.append(f"| limit | {60 / slower:.1f} | {60 / slower / base:.2f} | | | | |")
    return lines


def main() -> None:
    """Runs everything interleaved, so that a slow moment of the machine hits all settings alike."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--median", type=float, default=24.0, help="of the reply's tokens")
    parser.add_argument(
        "--sigma", type=float, default=0.83, help="0.83: coefficient of variation 1"
    )
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--port", type=int, default=7370)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "asynchrony.json")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this benchmark needs two cores")
    results: dict[int, list[dict[str, float]]] = {
        staleness: [] for staleness in arguments.staleness
    }
    for repeat in range(arguments.repeats):
        for staleness in arguments.staleness:
            result = run_once(arguments, staleness, arguments.port)
            results[staleness].append(result)
            speed = result["steps_per_minute"]
            print(
                f"# repeat {repeat + 1} max_staleness {staleness}: {speed:.1f} steps/min",
                flush=True,
            )
    lines = table(results)
    settings = {key: str(value) for key, value in vars(arguments).items() if key != "out"}
    record = {"settings": settings, "results": results, "table": lines}
    write_result("asynchrony", record, arguments.out)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
