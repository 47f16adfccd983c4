"""Lets the tiny model learn the quickstart's task as an agent, and from faster rollouts.

The agent (echo_agent.py) calls the model through OpenAI's client, and once more over a bare socket,
which shows what that client costs. Tasks, judge, settings and steps are equal; each repeat has a
seed of its own. A round of the evaluation samples each of the 26 held-out pairs 40 times: before
the first step, every 75 steps and after the last step. Faster rollouts lie further ahead of the
trainer; with `--staleness 0` all kinds train on tokens of the newest version alone.

The other kinds have a model in bfloat16. Their replies come from an engine with drafts, in FP8,
with both, that gets changed weights alone, or that rests while the learner trains.

    python benchmarks/agent_learning.py --repeats 3         # in turns: hours on two cores
    python benchmarks/agent_learning.py --kinds bf16 drafts fp8 fp8-drafts changes pause \
        --steps 75 --evaluate-every 25 --out benchmarks/results/faster_rollouts.json
    python benchmarks/agent_learning.py --device cuda --gpus 2 --side-by-side --workers 2 \
        --kinds environment agent --limit-s 400             # six runs at the same time

With `--smollm2` SmolLM2-135M-Instruct learns sums instead, as deploy/configs/smollm2-one-gpu.toml
says; 64 tasks are held out, each sampled eight times a round.

    python deploy/make_smollm2_model.py models/smollm2 --dtype bfloat16
    python benchmarks/agent_learning.py --device cuda --smollm2 models/smollm2 --side-by-side \
        --kinds bf16 drafts fp8 --steps 40 --evaluate-every 10

The processor time is that of all processes of a run, with their start; it is missing where a run
was cut off. Prints one table; benchmarks/results/agent_learning.json is written after every run
(on GPUs agent_learning-gpu.json, with `--smollm2` agent_learning-smollm2.json). With `--folder` the
runs stay there, and the same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from measure import RESULTS, Spread, note, part, progress, settings_of, table, visible, write_result
from quickstart_runs import CONFIG, RUN_LIMIT_S, Run, finished_run, make_model, run_quickstart

NAME = "agent_learning"
HERE = Path(__file__).resolve().parent
WARM_UP = 10
# The 26 pairs that are held out, each so often that a mean is known to 0.005.
SAMPLES = 40
EVALUATION = (
    f"evaluations.0.num_episodes={26 * SAMPLES}",
    f"evaluations.0.samples_per_task={SAMPLES}",
)
# Many runs share a GPU: each engine gets a small part of it, and a cache that holds all episodes.
ON_GPU = (
    "model.dtype=bfloat16",
    "rollout_server.gpu_memory_utilization=0.05",
    f"rollout_server.engine.kv_cache_memory_bytes={1 << 28}",
)
SMOLLM2 = HERE.parent / "deploy" / "configs" / "smollm2-one-gpu.toml"
WITH_SMOLLM2 = (
    "evaluations.0.num_episodes=512",
    "evaluations.0.samples_per_task=8",
    # A server for more makes no drafts.
    "rollout_server.max_episodes=256",
    # Several engines on one GPU compile for minutes otherwise.
    "rollout_server.enforce_eager=true",
    "rollout_server.threads=1",
    "learner.threads=1",
    "rollout_server.gpu_memory_utilization=0.05",
    f"rollout_server.engine.kv_cache_memory_bytes={3 << 29}",
)
Found: TypeAlias = dict[str, list[dict[str, Any]]]


def agent(name: str) -> tuple[str, ...]:
    """Returns the settings with which an agent of echo_agent.py takes the place of the task."""
    both = ("environments.0", "evaluations.0")
    references = [f"{section}.reference=echo_agent:{name}" for section in both]
    # To import OpenAI's client takes seconds, and longer on a busy machine.
    return *references, *(f"{section}.timeout_s=120" for section in both)


BF16 = ("model.dtype=bfloat16",)
DRAFTS = ("rollout_server.drafts=shared",)
FP8 = ("rollout_server.quantization=fp8_per_channel",)
AGENTS: dict[str, tuple[str, ...]] = {
    "environment": (),
    "agent": agent("EchoAgent"),
    "bare": agent("BareAgent"),
}
KINDS = AGENTS | {
    "bf16": BF16,
    "drafts": BF16 + DRAFTS,
    "fp8": BF16 + FP8,
    "fp8-drafts": BF16 + FP8 + DRAFTS,
    "changes": (*BF16, "weights.delta=host"),
    "pause": (*BF16, "controller.turns=pause"),
}


def settings_for(kind: str, repeat: int, arguments: argparse.Namespace) -> list[str]:
    """Returns the settings of one run that differ from those of its file."""
    workers = [f"{s}.0.num_workers={arguments.workers}" for s in ("environments", "evaluations")]
    on_gpu = ON_GPU if arguments.device == "cuda" else ()
    return [
        f"run.seed={repeat + 1}",
        f"run.steps={arguments.steps}",
        f"evaluations.0.every_steps={arguments.evaluate_every}",
        *(WITH_SMOLLM2 if arguments.smollm2 else (*EVALUATION, *on_gpu)),
        *KINDS[kind],
        *workers,
        *(
            []
            if arguments.staleness is None
            else [f"algorithm.max_staleness={arguments.staleness}"]
        ),
    ]


def figures(run: Run) -> dict[str, Any]:
    """Returns the held-out rewards by step, and the speed after the first `WARM_UP` steps."""
    (spread,) = (name for name in run.evaluations[0] if name.endswith("-heldout/reward_std"))
    heldout = {row["evaluation_step"]: row["reward_heldout"] for row in run.evaluations}
    last = max(run.evaluations, key=lambda row: row["evaluation_step"])
    measured = run.rows[WARM_UP:]
    seconds = measured[-1]["wall_s"] - run.rows[WARM_UP - 1]["wall_s"]
    return {
        "heldout": heldout,
        "last": last["reward_heldout"],
        "last_error": last[spread] / math.sqrt(last["num_episodes"]),
        "tokens_per_s": sum(row["trained_tokens"] for row in measured) / seconds,
        "wall_s": run.rows[-1]["wall_s"],
        "step_cpu_s": None if run.cpu_s is None else run.cpu_s / len(run.rows),
        "lag": statistics.fmean(row["lag_mean"] for row in run.rows),
        "difference": run.summary["ledger"]["difference"],
    }


def measure(
    folder: Path,
    arguments: argparse.Namespace,
    *,
    start: Callable[..., Run] = run_quickstart,
    write: Callable[[Found, dict[str, str]], object] = lambda *_: None,
) -> tuple[Found, dict[str, str]]:
    """Makes the runs that are not finished in `folder`; returns the figures and failures of all.

    A run that fails does not end the others. `write` gets what is known after each run.
    """
    end_s = time.monotonic() + arguments.limit_s
    model = folder / "model"
    if arguments.smollm2 and not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        model.symlink_to(arguments.smollm2.resolve())
    elif not model.exists():
        make_model(folder)
    found: Found = {kind: [] for kind in arguments.kinds}
    failures: dict[str, str] = {}
    jobs = [(kind, repeat) for repeat in range(arguments.repeats) for kind in arguments.kinds]

    def one(number: int) -> Run:
        kind, repeat = jobs[number]
        run = finished_run(folder, f"{kind}-{repeat}")
        if run is not None and len(run.rows) >= arguments.steps:
            return run
        # The agent lies beside this file.
        config = SMOLLM2 if arguments.smollm2 else CONFIG
        run_it = partial(start, folder, f"{kind}-{repeat}", config=config, cwd=HERE)
        if arguments.device == "cuda":
            # Each GPU gets runs of every kind.
            gpu = visible([(repeat + arguments.kinds.index(kind)) % arguments.gpus])
            run_it = partial(run_it, environ={"CUDA_VISIBLE_DEVICES": gpu})
        limit_s = min(RUN_LIMIT_S, end_s - time.monotonic())
        return run_it(settings_for(kind, repeat, arguments), limit_s=limit_s)

    with concurrent.futures.ThreadPoolExecutor(len(jobs) if arguments.side_by_side else 1) as pool:
        pending = {pool.submit(one, number): number for number in range(len(jobs))}
        for done in concurrent.futures.as_completed(pending):
            kind, repeat = jobs[pending[done]]
            with part(f"{kind}, repeat {repeat}", failures):
                found[kind].append({"repeat": repeat, **figures(done.result())})
                note(NAME, {"kind": kind, **found[kind][-1]})
                progress(f"{found[kind][-1]}")
            write(found, failures)
    return found, failures


def standard_error(values: Sequence[float]) -> float | None:
    """Returns the standard error of a mean; None where one value says nothing of it."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def with_error(value: float, *errors: float | None) -> str:
    """Returns a figure and the error of it, whose independent parts are `errors`."""
    known = [error for error in errors if error is not None]
    shown = f"{math.hypot(*known):.3f}" if len(known) == len(errors) else "?"
    return f"{value:.3f} +- {shown}"


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """Returns the difference of two means with its standard error."""
    less = statistics.fmean(values) - statistics.fmean(others)
    return with_error(less, standard_error(values), standard_error(others))


def mean_of_rounds(run: dict[str, Any]) -> float:
    """Returns the mean held-out reward of a run's rounds after the first step: of its curve."""
    return statistics.fmean(reward for step, reward in run["heldout"].items() if int(step) > 0)


def lines_of(found: Found) -> list[str]:
    """Returns the table: a row for each kind that has runs, and its differences from the first."""
    header = ["kind", "runs", "held-out reward, mean", "least-greatest", "error of one round"]
    header += [
        "minus the first",
        "mean of all rounds",
        "minus the first",
        "lag",
        "tokens/s",
        "of the first",
        "processor time of a step, s",
    ]
    rows: list[list[str]] = []
    kinds = {kind: runs for kind, runs in found.items() if runs}
    plain = next(iter(kinds.values()), [])
    for kind, runs in kinds.items():
        last, first = ([one["last"] for one in each] for each in (runs, plain))
        speed, plain_speed = ([one["tokens_per_s"] for one in each] for each in (runs, plain))
        curve, first_curve = ([mean_of_rounds(one) for one in each] for each in (runs, plain))
        rows.append(
            [
                kind,
                str(len(runs)),
                with_error(statistics.fmean(last), standard_error(last)),
                f"{min(last):.3f}-{max(last):.3f}",
                f"{statistics.fmean([one['last_error'] for one in runs]):.3f}",
                "-" if runs is plain else difference(last, first),
                with_error(statistics.fmean(curve), standard_error(curve)),
                "-" if runs is plain else difference(curve, first_curve),
                f"{statistics.fmean([one['lag'] for one in runs]):.2f}",
                Spread.of(speed).text(0),
                f"{statistics.median(speed) / statistics.median(plain_speed):.3f}",
                step_cpu_s(runs),
            ]
        )
    return table(header, rows)


def step_cpu_s(runs: list[dict[str, Any]]) -> str:
    """Returns the processor time of a step in the runs that were not cut off."""
    known = [one["step_cpu_s"] for one in runs if one["step_cpu_s"] is not None]
    return Spread.of(known).text(2) if known else "-"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--evaluate-every", type=int, default=75, help="steps; 0: first and last")
    parser.add_argument("--staleness", type=int, help="max_staleness (default: the quickstart's)")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(AGENTS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpus", type=int, default=1, help="shared by the runs; with cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes of a run's tasks")
    parser.add_argument("--side-by-side", action="store_true", help="all runs at the same time")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all runs together")
    parser.add_argument("--smollm2", type=Path, metavar="FOLDER", help="train this model instead")
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: nowhere)")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}, got {arguments.steps}")
    if arguments.smollm2 and not set(arguments.kinds).isdisjoint(AGENTS):
        parser.error(
            "--smollm2 trains the kinds of bf16 alone, got --kinds " + " ".join(arguments.kinds)
        )
    on_gpu = "-gpu" if arguments.device == "cuda" else ""
    path = arguments.out or RESULTS / f"{NAME}{'-smollm2' if arguments.smollm2 else on_gpu}.json"

    def write(found: Found, failures: dict[str, str]) -> None:
        lines = lines_of(found)
        record = {"settings": settings_of(arguments), "runs": found, "failures": failures}
        write_result(path.stem, {**record, "table": lines}, path)

    with tempfile.TemporaryDirectory() as name:
        found, failures = measure(arguments.folder or Path(name), arguments, write=write)
    print("\n".join(lines_of(found)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
