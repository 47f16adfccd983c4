r"""Do learner and engine agree? The gap of their log-probabilities for each type of numbers.

Three parts, each of which goes on when something in it has failed:

- gap: a synchronous run of every model in every type (logprob_gap.py), all at once on a GPU. Gap,
  divergence and the tokens outside the clip range 0.8 to 1.2 are those of lag 0, over all steps.
- learner: training steps of the shape 0.6B, two types side by side in turns, the third after them.
- flow: a steady flow of rollouts (flow.py) through an engine in bfloat16 and one in float16.

    python -m benchmarks.agreement.types --out FOLDER                # one H200, 8 to 9 minutes
    python -m benchmarks.agreement.types --model models/smollm2 --out FOLDER
    python -m benchmarks.agreement.types --parts gap --out FOLDER    # one part alone
    python -m benchmarks.agreement.types --device cpu --out FOLDER         # a rehearsal, tiny

Prints one short table last; FOLDER/agreement.json is written after each measurement, and the logs
of what failed are beside it. A later call adds its parts to what FOLDER has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from slipstream.client.launch.preflight import free_port
from slipstream.core.machine.process import die_with_parent

from benchmarks.agreement.families import run
from benchmarks.agreement.logprob_gap import DTYPES
from benchmarks.common.measure import (
    Spread,
    part,
    program,
    progress,
    settings_of,
    table,
    write_result,
)
from benchmarks.common.shapes import SHAPES, make_apart
from benchmarks.learner.loops import LOADS, lognormal_batch, shape_config, synchronize

NAME = "agreement"
PARTS = ("gap", "learner", "flow")
BAND = (0.8, 1.2)
STEPS, TURNS, WARMUP_TURNS = 2, 4, 2
# Shares of a GPU's memory for two learners side by side, and KV cache of each of two engines.
LEARNER_SHARE, KV_GIB = 0.47, 40
LIMITS_S = {"gap": 300.0, "learner": 300.0, "flow": 330.0}


@dataclass
class Found:
    """What was measured, by part, by model and type."""

    arguments: argparse.Namespace
    gap: dict[str, dict[str, Any]] = field(default_factory=dict)
    learner: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    flow: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Takes over what an earlier call left for the parts that this one does not measure."""
        path = self.arguments.out / f"{NAME}.json"
        earlier = json.loads(path.read_text()) if path.exists() else {}
        for name in set(PARTS) - set(self.arguments.parts):
            setattr(self, name, earlier.get(name, {}))

    def write(self) -> None:
        """Writes what is known by now."""
        record = {
            "settings": settings_of(self.arguments),
            **{name: getattr(self, name) for name in PARTS},
            "table": self.table(),
            "failures": self.failures,
        }
        write_result(NAME, record, self.arguments.out / f"{NAME}.json")

    def table(self) -> list[str]:
        """Returns a line for each model and type; speeds are those of the shape, not the model."""
        header = ["model, type", "gap: mean", "largest", "KL (k3)", "outside 0.8 to 1.2"]
        header += ["repeated passes", "publish, ms", "learner, tokens/s", "flow, tokens/s"]
        rows = []
        for key, found in self.gap.items():
            model, dtype = key.split(", ")
            cells = [f"{found[name]:.2g}" for name in ("mean", "largest", "kl", "outside")]
            cells += [f"{found['overflows']:.0f}", f"{1000 * found['publish_s']:.0f}"]
            rows.append([key, *cells, *(self.speeds(dtype) if model != "smollm2" else ["", ""])])
        if not rows:
            rows = [[dtype, *([""] * 6), *self.speeds(dtype)] for dtype in self.learner]
        return table(header, rows)

    def speeds(self, dtype: str) -> list[str]:
        """Returns the learner's and the flow's tokens/s, with ratios to bfloat16."""
        learner = {
            name: [turn["tokens"] / turn["seconds"] for turn in turns]
            for name, turns in self.learner.items()
        }
        flow = {
            row.removeprefix("flow: ").partition(",")[0]: [
                turn["tokens"] / turn["window_s"] for turn in turns
            ]
            for row, turns in self.flow.get("turns", {}).items()
        }
        cells = []
        for speeds in (learner, flow):
            known = {name: Spread.of(values).median for name, values in speeds.items() if values}
            base = known.get("bfloat16")
            ratio = f" ({known[dtype] / base:.3f})" if base and dtype in known else ""
            cells.append(f"{known[dtype]:,.0f}{ratio}" if dtype in known else "-")
        return cells


def measure_gaps(found: Found, folder: Path) -> None:
    """Trains every model in every type for some steps, and compares learner and server."""
    arguments = found.arguments
    shape = "0.6B" if arguments.device == "cuda" else "tiny"
    models = {shape: make_apart(folder / shape, shape)}
    if arguments.model is not None:
        models["smollm2"] = arguments.model.resolve()
    jobs = [(name, dtype) for name in models for dtype in arguments.dtypes]

    def measured(job: tuple[str, str]) -> None:
        name, dtype = job
        with part(f"gap {name}, {dtype}", found.failures):
            replies = ["--replies"] if name == shape else []
            own = folder / f"gap-{name}-{dtype}"
            own.mkdir()
            rows = gap_rows(own, models[name], dtype, replies, arguments)
            found.gap[f"{name}, {dtype}"] = gap_figures(rows)
            progress(f"{name}, {dtype}: {found.gap[f'{name}, {dtype}']}")
            found.gap = {key: found.gap[key] for key in map(", ".join, jobs) if key in found.gap}
            found.write()

    with ThreadPoolExecutor(len(jobs) if arguments.device == "cuda" else 1) as pool:
        list(pool.map(measured, jobs))


def gap_rows(
    folder: Path, model: Path, dtype: str, more: Sequence[str], arguments: argparse.Namespace
) -> list[dict[str, float]]:
    """Returns the rows of all steps of a run; RuntimeError with the reason if it failed."""
    out, log = folder / "result.json", arguments.out / f"{folder.name}.log"
    # The band leaves what is outside it out of the loss, and counts it.
    algorithm = {"weight_args": {"token_band": BAND}}
    command = [*program("agreement.logprob_gap"), "--device", arguments.device]
    command += ["--model", str(model), "--dtype", dtype, "--steps", str(arguments.steps), *more]
    command += ["--no-fresh", "--out", str(out), "--algorithm", json.dumps(algorithm)]
    failure = run(command, log, limit_s=LIMITS_S["gap"], gpu=0)
    if failure:
        raise RuntimeError(f"{failure}: {log.read_text(errors='replace')[-6000:]}")
    rows: list[dict[str, float]] = json.loads(out.read_text())["rows"]
    return rows


def gap_figures(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the figures of a run at lag 0: means over its tokens, the median publish."""
    tokens = [row["trained_tokens"] for row in rows]

    def mean(name: str) -> float:
        return float(np.average([row[name] for row in rows], weights=tokens))

    return {
        "tokens": sum(tokens),
        "mean": mean("logprob_gap_mean"),
        "largest": max(row["logprob_gap_max"] for row in rows),
        "kl": mean("kl"),
        "outside": mean("masked_token_fraction"),
        "entropy": mean("entropy"),
        "overflows": sum(row.get("gradient_overflows", 0) for row in rows),
        "loss_scale": rows[-1].get("loss_scale", 1.0),
        "publish_s": float(np.median([row["publish_s"] for row in rows[1:]])),
    }


class Learner:
    """A program that trains the shape in one type, some steps at each turn."""

    def __init__(self, dtype: str, folder: Path, arguments: argparse.Namespace) -> None:
        """Starts it."""
        command = [*program("agreement.types"), "--learner", dtype, "--device", arguments.device]
        command += ["--out", str(folder / f"learner-{dtype}")]
        self.dtype = dtype
        self._log_path = arguments.out / f"learner-{dtype}.log"
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                preexec_fn=die_with_parent,
            )

    def turn(self) -> dict[str, float]:
        """Returns what some steps took; RuntimeError with the log's end if it has failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print("go", file=self._process.stdin, flush=True)
        ready, _, _ = select.select([self._process.stdout], [], [], LIMITS_S["learner"])
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close()
            end = self._log_path.read_text(errors="replace")[-6000:]
            raise RuntimeError(f"the learner in {self.dtype} said nothing: {end}")
        found: dict[str, float] = json.loads(line)
        return found

    def close(self) -> None:
        """Ends the program."""
        self._process.kill()
        self._process.wait()


def measure_learners(found: Found, folder: Path) -> None:
    """Takes turns of the learners: two side by side, so that both see the same machine."""
    dtypes = found.arguments.dtypes
    for pair in (dtypes[start : start + 2] for start in range(0, len(dtypes), 2)):
        learners = [Learner(dtype, folder, found.arguments) for dtype in pair]
        # The first turn waits until all have loaded and compiled, and is not counted.
        for number in range(1 + TURNS):
            for learner in list(learners):
                with part(f"learner {learner.dtype}, turn {number}", found.failures):
                    try:
                        turn = learner.turn()
                    except RuntimeError:
                        learners.remove(learner)
                        raise
                    progress(f"{turn['tokens'] / turn['seconds']:,.0f} tokens/s {turn}")
                    if number:
                        found.learner.setdefault(learner.dtype, []).append(turn)
                        found.write()
        for learner in learners:
            learner.close()


def learn(arguments: argparse.Namespace) -> None:
    """Is the program of `Learner`: a turn for each line of its input."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever libraries print belongs into the log.
    os.dup2(2, 1)
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    shape = "0.6B" if torch.cuda.is_available() else "tiny"
    load = LOADS[shape]
    config = shape_config(shape, load, arguments.out, threads=2, dtype=arguments.learner)
    if torch.cuda.is_available():
        learner = config.learner.model_copy(update={"gpu_memory_fraction": LEARNER_SHARE})
        config = config.model_copy(update={"learner": learner})
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    policy = open_policy(config, Launch(0, 1, 0), load_weights=False)
    training = TrainingStep(policy, config)
    batches = [lognormal_batch(load, SHAPES[shape].vocab, step) for step in range(STEPS)]

    def turn() -> dict[str, float]:
        started = time.perf_counter()
        metrics = [training.run(batch).metrics for batch in batches]
        synchronize(policy.ranks.device)
        return {
            "tokens": float(sum(len(t.token_ids) for b in batches for t in b.trajectories)),
            "seconds": time.perf_counter() - started,
            "forward_backward_s": sum(one["forward_backward_s"] for one in metrics),
            "optimizer_s": sum(one["optimizer_s"] for one in metrics),
            "overflows": sum(one.get("gradient_overflows", 0) for one in metrics),
            "loss_scale": metrics[-1].get("loss_scale", 1.0),
        }

    for _ in range(WARMUP_TURNS):
        turn()
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answers, flush=True)


def measure_flow(found: Found) -> None:
    """Sends a flow of rollouts through an engine for each of two types, in turns."""
    arguments = found.arguments
    out, log = arguments.out / "flow-dtypes.json", arguments.out / "flow.log"
    out.unlink(missing_ok=True)
    command = [*program("rollout.flow"), "--device", arguments.device]
    command += [
        "--dtypes",
        *arguments.dtypes[: arguments.flow_types],
        "--repeats",
        "3",
        "--out",
        str(out),
    ]
    if arguments.device == "cuda":
        # Engines whose memory is told, not measured, start at once.
        command += ["--kv-gib", str(KV_GIB), "--limit-s", str(LIMITS_S["flow"] - 60)]
    failure = run(command, log, limit_s=LIMITS_S["flow"], gpu=0)
    if out.exists():
        record = json.loads(out.read_text())
        found.flow = {name: record[name] for name in ("turns", "check", "table", "failures")}
        found.write()
    if failure or found.flow.get("failures"):
        said = failure or json.dumps(found.flow["failures"])
        raise RuntimeError(f"{said}: {log.read_text(errors='replace')[-6000:]}")


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", type=Path, help="SmolLM2's folder, beside the random shape")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=DTYPES[:3], help="the first two are compared"
    )
    parser.add_argument("--flow-types", type=int, default=2, help="the first so many have a flow")
    parser.add_argument("--steps", type=int, default=8, help="updates of each run of the part gap")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--learner", choices=DTYPES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measures the parts one after the other; returns 1 if one failed."""
    arguments = parse_arguments()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.learner is not None:
        learn(arguments)
        return 0
    found = Found(arguments)
    with tempfile.TemporaryDirectory() as name:
        if "gap" in arguments.parts:
            with part("gap", found.failures):
                measure_gaps(found, Path(name))
        if "learner" in arguments.parts:
            measure_learners(found, Path(name))
        if "flow" in arguments.parts:
            with part("flow", found.failures):
                measure_flow(found)
    found.write()
    for failed in found.failures:
        print(f"FAILED: {failed}")
    print("\n".join(found.table()), flush=True)
    return int(bool(found.failures))


if __name__ == "__main__":
    sys.exit(main())
