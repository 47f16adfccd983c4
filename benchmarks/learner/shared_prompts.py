"""Compares a training step that computes the prompt of a group once with one that does not.

Both steps are `TrainingStep.run` on the same batches and parameters, in turns; the one without has
no `PrefixSharing`. The goal is the share of tokens that are left to compute. Attention of replies
and logits stay, so the limit is the share of the work that is left.

    python -m benchmarks.learner.shared_prompts                       # a small model, on a CPU
    python -m benchmarks.learner.shared_prompts --shape 0.6B          # a random Qwen3-0.6B on a GPU
    python -m benchmarks.learner.shared_prompts --shape 8B --layers 12 --groups 4 --repeats 3

Prints one table and writes benchmarks/results/shared-prompts-SHAPE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.machine.address import free_port
from slipstream.learner.trainer.batches.batch import Batch

from benchmarks.common import measure
from benchmarks.common.shapes import SHAPES, Shape
from benchmarks.learner.loops import LOADS, make_trajectory, shape_config, synchronize

WITH = "shared"
WITHOUT = "without"


def group_batch(arguments: argparse.Namespace, prompt: int, vocab: int, step: int) -> Batch:
    """Returns groups of random replies, all of one length, each group with one random prompt."""
    random = np.random.default_rng(step)
    size = arguments.group_size
    trajectories = []
    for number in range(arguments.groups * size):
        sizes = prompt, arguments.reply
        trajectory = make_trajectory(random, step, number, sizes, vocab=vocab, group_size=size)
        if number % size:
            beginning = trajectories[number - number % size].token_ids[:prompt]
            ids = np.concatenate([beginning, trajectory.token_ids[prompt:]])
            trajectory = dataclasses.replace(trajectory, token_ids=ids)
        trajectories.append(trajectory)
    return Batch(step, f"batch-{step}", tuple(trajectories))


def computed(batch: Batch) -> int:
    """Returns the tokens that are computed when each prompt is computed once in the whole step."""
    trajectories = batch.trajectories
    prompts = {trajectory.group_id: trajectory.run_lengths[0] - 1 for trajectory in trajectories}
    num_reply_tokens = sum(
        len(trajectory.token_ids) - prompts[trajectory.group_id] for trajectory in trajectories
    )
    return num_reply_tokens + sum(prompts.values())


def work_of(
    shape: Shape, arguments: argparse.Namespace, prompt: int, *, shared: bool
) -> dict[str, float]:
    """Returns the floating-point operations of a step for layers' matrices, attention and logits.

    Its groups have `prompt` tokens, computed once if `shared`. A backward pass takes twice the
    operations of its forward pass, and of attention 2.5 times.
    """
    replies = arguments.groups * arguments.group_size
    reply = arguments.reply
    prompts = arguments.groups if shared else replies
    parameters = sum(
        math.prod(sizes)
        for name, sizes in shape.tensors()
        if len(sizes) == 2 and name.startswith("model.layers.")
    )
    pairs = prompts * prompt**2 / 2 + replies * (reply * prompt + reply**2 / 2)
    width = shape.heads * shape.head_dim
    return {
        "layers": 6 * parameters * (prompts * prompt + replies * reply),
        "attention": 3.5 * 4 * width * shape.layers * pairs,
        "logits": 6 * shape.hidden * shape.vocab * replies * reply,
    }


def compare(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Returns the times of both steps for each length of the prompt."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    longest = max(arguments.prompts) + arguments.reply
    tokens = max(arguments.micro_batch_tokens, longest)
    load = dataclasses.replace(
        LOADS[arguments.shape],
        layers=arguments.layers or LOADS[arguments.shape].layers,
        micro_batch_tokens=tokens,
        group_size=arguments.group_size,
    )
    shape = dataclasses.replace(SHAPES[arguments.shape], layers=load.layers)
    config = shape_config(arguments.shape, load, folder, threads=arguments.threads)
    # Weights that stay as they are: both steps must find the same loss and gradient.
    still = config.algorithm.model_copy(update={"learning_rate": 1e-30})
    config = config.model_copy(update={"algorithm": still})
    policy = open_policy(config, Launch(0, 1, 0), load_weights=False)
    assert policy.sharing is not None
    steps = {
        WITH: TrainingStep(policy, config),
        WITHOUT: TrainingStep(dataclasses.replace(policy, sharing=None), config),
    }
    comparisons = []
    for prompt in arguments.prompts:
        batch = group_batch(arguments, prompt, SHAPES[arguments.shape].vocab, 0)
        measure.progress(f"prompts of {prompt}: {len(batch.trajectories)} sequences")
        works = {name: work_of(shape, arguments, prompt, shared=name == WITH) for name in steps}
        row = one_length(steps, batch, arguments, policy.ranks.device)
        comparisons.append(row | {"prompt": prompt, "work": works})
    policy.ranks.close()
    return comparisons


def one_length(
    steps: dict[str, Any], batch: Batch, arguments: argparse.Namespace, device: torch.device
) -> dict[str, Any]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    metrics: dict[str, dict[str, float]] = {}
    peaks: dict[str, float] = {}
    for repeat in range(-arguments.warmup, arguments.repeats):
        for name, step in steps.items():
            gc.collect()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            synchronize(device)
            started_s = time.perf_counter()
            result = step.run(batch)
            synchronize(device)
            took_s = time.perf_counter() - started_s
            metrics.setdefault(name, result.metrics)
            if device.type == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated(device) / 2**30
            if repeat >= 0:
                times[name].append(1000 * took_s)
            measure.progress(f"repeat {repeat + 1} {name}: {1000 * took_s:.0f} ms")
    num_tokens = sum(len(trajectory.token_ids) for trajectory in batch.trajectories)
    return {
        "times_ms": times,
        "peak_gib": peaks,
        "tokens": num_tokens,
        "token_share": computed(batch) / num_tokens,
        "metrics": {name: {k: m[k] for k in ("loss", "grad_norm")} for name, m in metrics.items()},
    }


def rows(found: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Returns a row for each length: times, their ratio and the limit."""
    lines: list[list[object]] = []
    for comparison in found:
        spreads = {
            name: measure.Spread.of(times_ms) for name, times_ms in comparison["times_ms"].items()
        }
        ratio = spreads[WITH].median / spreads[WITHOUT].median
        share = comparison["token_share"]
        work = comparison["work"]
        work_share = sum(work[WITH].values()) / sum(work[WITHOUT].values())
        lines.append(
            [
                comparison["prompt"],
                spreads[WITHOUT].text(1),
                spreads[WITH].text(1),
                f"{ratio:.3f}",
                f"{share:.3f}",
                f"{ratio / share:.2f}",
                f"{work_share:.3f}",
                f"{ratio / work_share:.2f}",
            ]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(LOADS), default="tiny")
    parser.add_argument("--prompts", type=int, nargs="+", help="lengths; default: 128 and 2048")
    parser.add_argument("--reply", type=int, help="tokens of each reply; default: 512")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--layers", type=int, default=0, help="0: those of the learner's benchmark")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    is_small = arguments.shape == "tiny"
    arguments.prompts = arguments.prompts or ([64, 256] if is_small else [128, 2048])
    arguments.reply = arguments.reply or (64 if is_small else 512)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    with tempfile.TemporaryDirectory() as folder:
        comparisons = compare(arguments, Path(folder))
    header = ["prompt", "without, ms (min-max)", "shared, ms (min-max)", "ratio", "tokens left"]
    header += ["ratio / tokens left", "work left", "ratio / work left"]
    table = measure.table(header, rows(comparisons))
    record = {"settings": measure.settings_of(arguments), "table": table, "lengths": comparisons}
    from slipstream.learner.trainer.layers.attention import chosen_attention

    record["attention"] = chosen_attention()
    measure.write_result(f"shared-prompts-{arguments.shape}", record, arguments.out)
    print("\n".join([*table, f"attention: {record['attention']}"]))
    for comparison in comparisons:
        print(comparison["prompt"], comparison["metrics"], comparison["peak_gib"])


if __name__ == "__main__":
    main()
