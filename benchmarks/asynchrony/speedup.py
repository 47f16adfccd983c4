r"""Measures how much faster a run is when its two fleets do not wait for each other.

The bound on the lag changes between windows of steps of one run, so that all settings see the same
processes, data and moments of the machine. Lengths of replies are lognormal with coefficient of
variation 1. Each repeat measures:

- first the work of each fleet by itself: generation of `--steps` batches while the learner has no
  batch, at the rate of servers that are never short of work, then training of these batches while
  nothing is generated. The slower of the two is the ceiling;
- then a window of `--steps` steps or more for each `max_staleness`. 0 is the synchronous
  algorithm.

On a CPU the learner has one core and the rollout server the other; with `--device cuda` each has a
GPU of its own:

    python -m benchmarks.asynchrony.speedup --repeats 5
    python -m benchmarks.asynchrony.speedup --device cuda --shape 0.6B --median 96 --longest 1024 \
        --group-size 16 --max-episodes 256

Prints one table; benchmarks/results/asynchrony.json, or asynchrony-SHAPE.json on GPUs, is written
after every repeat.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import uvloop
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.machine.address import free_port
from slipstream.core.settings.config import Config

from benchmarks.asynchrony.step_windows import Row, Windows
from benchmarks.common.measure import (
    Spread,
    note,
    part,
    progress,
    settings_of,
    table,
    write_result,
)
from benchmarks.common.rig import Placement, Rig
from benchmarks.common.shapes import SHAPES, make_apart

TARGET = 0.80
# The lengths of replies have a coefficient of variation of 1.
SIGMA = 0.8326
START_LIMIT_S = 400.0


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    """Returns the settings of the run; its bound on the lag is that of the widest window."""
    on_gpu = arguments.device == "cuda"
    lengths = {"median": arguments.median, "sigma": SIGMA, "longest": arguments.longest}
    settings = {
        "run": {"name": "r", "dir": str(folder), "steps": 1_000_000},
        "model": {"path": str(folder / "model"), "dtype": "bfloat16" if on_gpu else "float32"},
        "environments": [
            {
                "name": "lognormal",
                "reference": "benchmarks.common.workloads:LognormalReplies",
                "args": lengths,
            }
        ],
        "algorithm": {
            "group_size": arguments.group_size,
            "groups_per_step": arguments.groups_per_step,
            "max_staleness": max(*arguments.staleness, arguments.steps),
            "learning_rate": 1e-6,
        },
        "sampling": {
            "max_reply_tokens": arguments.longest,
            "max_episode_tokens": arguments.longest + 16,
        },
        "debug": {"ignore_eos": True},
        "controller": {
            "address": f"127.0.0.1:{free_port('127.0.0.1')}",
            # The rate of generation is read from heartbeats.
            "heartbeat_timeout_s": 2.0,
            "sample_every_steps": 1_000_000,
        },
        "learner": {
            "micro_batch_tokens": 16384 if on_gpu else 4096,
            "threads": 4 if on_gpu else 1,
            "export_final": False,
        },
        "rollout_server": {
            "max_episodes": arguments.max_episodes,
            "threads": 4 if on_gpu else 1,
            "enforce_eager": arguments.enforce_eager or not on_gpu,
            "recompute_context": not arguments.keep_context,
        },
        "weights": {"verify_every": 1_000_000, "transport": arguments.transport},
        # A checkpoint would fall into some windows and not into others.
        "checkpoint": {"every_steps": arguments.checkpoint_every},
    }
    return parse_config(settings, source="the benchmark")


@dataclass
class Found:
    """The rows of both fleets alone and of every setting, and the failures."""

    rows: dict[str, list[Row]]
    failures: dict[str, str] = field(default_factory=dict)


async def measure(arguments: argparse.Namespace, folder: Path, found: Found) -> None:
    """Fills `found`, and writes the result, repeat by repeat until one fails."""
    make_apart(
        folder / "model",
        arguments.shape,
        dtype="bfloat16" if arguments.device == "cuda" else "float32",
        max_positions=arguments.longest + 64,
    )
    placement = Placement((0,), ((1,),), arguments.device)
    async with Rig(config_of(arguments, folder), placement) as rig:
        rig.controller.bound(0)
        await rig.start_trainers()
        await rig.start_server(0)
        waited_s = await rig.until_serving(START_LIMIT_S)
        progress(f"both fleets are up after {waited_s:.0f} s")
        windows = Windows(
            rig,
            steps=arguments.steps,
            limit_s=arguments.window_limit_s,
        )
        deadline = time.monotonic() + arguments.limit_s
        longest_s = 0.0
        for repeat in range(arguments.repeats):
            started = time.monotonic()
            if started + longest_s > deadline:
                progress(f"no time for repeat {repeat + 1}")
                break
            with part(f"repeat {repeat + 1}", found.failures):
                for name, rows in found.rows.items():
                    row = await (windows.alone() if name == "alone" else windows.bounded(int(name)))
                    rows.append(row)
                    note("asynchrony", {"repeat": repeat, "setting": name, **row})
                    shown = {key: round(value, 3) for key, value in row.items()}
                    progress(f"repeat {repeat + 1}, {name}: {shown}")
            longest_s = max(longest_s, time.monotonic() - started)
            write(arguments, found)
            if found.failures:
                break


def summary(found: dict[str, list[Row]]) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Returns the table, and by setting the speed-up and its share of the ceiling.

    Each repeat is compared with its own synchronous window and its own work of both fleets.
    """
    generation = Spread.of([row["generation_s"] for row in found["alone"]])
    training = Spread.of([row["training_s"] for row in found["alone"]])
    rows: list[list[object]] = []
    shares: dict[str, dict[str, float]] = {}
    for name in (name for name in found if name != "alone"):
        complete = list(zip(found[name], found["0"], found["alone"], strict=False))
        speedup = Spread.of([base["step_s"] / row["step_s"] for row, base, _ in complete])
        ceiling = Spread.of(
            [base["step_s"] / max(a["generation_s"], a["training_s"]) for _, base, a in complete]
        )
        share = Spread.of(
            [max(a["generation_s"], a["training_s"]) / row["step_s"] for row, _, a in complete]
        )
        lag = Spread.of([row["lag_mean"] for row in found[name]])
        # Below 1 the window used groups that were complete before it.
        made = Spread.of([row["generated"] / row["tokens"] for row in found[name]])
        step = Spread.of([row["step_s"] for row in found[name]])
        shares[name] = {
            "speedup": speedup.median,
            "ceiling": ceiling.median,
            "share": share.median,
            "step_s": step.median,
        }
        cells = (step.text(2), speedup.text(2), ceiling.text(2), share.text(2), f"{lag.median:.2f}")
        rows.append([name, *cells, made.text(2)])
    rows.append(["generation alone", generation.text(2), "", "", "", "", ""])
    rows.append(["training alone", training.text(2), "", "", "", "", ""])
    header = ["max_staleness", "s/step", "speed-up", "ceiling", "share of the ceiling", "lag"]
    return table([*header, "tokens made / trained"], rows), shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", default="", help="of the weights; default: of the device")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of one window, at least")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--median", type=float, default=24.0, help="of the reply's tokens")
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups-per-step", type=int, default=8)
    parser.add_argument("--max-episodes", type=int, default=64)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--keep-context", action="store_true", help="rollout_server.recompute_context = false"
    )
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps; 0: none")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="no new repeat after it")
    parser.add_argument("--window-limit-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if 0 not in arguments.staleness:
        parser.error("--staleness needs 0, with which the others are compared")
    episodes = arguments.steps * arguments.groups_per_step * arguments.group_size
    if episodes < 2 * arguments.max_episodes:
        parser.error(
            f"a window of {episodes} episodes must be at least twice --max-episodes, "
            f"got {arguments.max_episodes}"
        )
    if arguments.device == "cpu" and len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this benchmark needs two cores")
    arguments.transport = arguments.transport or ("gloo" if arguments.device == "cpu" else "nccl")
    found = Found({name: [] for name in ("alone", *map(str, arguments.staleness))})
    with tempfile.TemporaryDirectory() as name:
        with part("the whole", found.failures):
            uvloop.run(measure(arguments, Path(name), found))
        if found.failures:
            for log in sorted((Path(name) / "r" / "logs").glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", flush=True)
    print("\n".join(write(arguments, found)), flush=True)
    if found.failures:
        raise SystemExit(f"failed: {', '.join(found.failures)}")


def write(arguments: argparse.Namespace, found: Found) -> list[str]:
    """Writes the result as far as it is known; returns its table."""
    lines: list[str] = []
    shares: dict[str, dict[str, float]] = {}
    if all(found.rows.values()):
        lines, shares = summary(found.rows)
        best = max((v["share"] for n, v in shares.items() if n != "0"), default=0.0)
        lines += ["", f"best share of the ceiling {best:.2f}, target {TARGET:.2f}"]
    settings = settings_of(arguments)
    spreads = {
        name: {key: asdict(Spread.of([row[key] for row in rows])) for key in rows[0]}
        for name, rows in found.rows.items()
        if rows
    }
    record = {"settings": settings, "results": found.rows, "spreads": spreads, "shares": shares}
    more = {"target": TARGET, "table": lines, "failures": found.failures}
    result = "asynchrony" if arguments.device == "cpu" else f"asynchrony-{arguments.shape}"
    write_result(result, {**record, **more}, arguments.out)
    return lines


if __name__ == "__main__":
    main()
