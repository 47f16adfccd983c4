"""Compares a training step that computes the prompt of a group once with one that does not.

Both steps are `TrainingStep.run` on the same batches and parameters, in turns; the one without has
no `PrefixSharing`. The limit is the share of tokens that are left to compute.

    python benchmarks/shared_prompts.py                       # a small model, on a CPU
    python benchmarks/shared_prompts.py --shape 0.6B          # a random Qwen3-0.6B on a GPU

Prints one table and writes benchmarks/results/shared-prompts-SHAPE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import measure
import numpy as np
import torch
from learner_loops import LOADS, make_trajectory, shape_config, synchronize
from shapes import SHAPES
from slipstream.client.launch.preflight import free_port
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.model.attention_choice import chosen_attention

WITH, WITHOUT = "shared", "without"
WARMUP_STEPS = 2


def group_batch(arguments: argparse.Namespace, prompt: int, vocab: int, step: int) -> Batch:
    """Returns groups of random replies, all of one length, each group with one random prompt."""
    random = np.random.default_rng(step)
    size, found = arguments.group_size, []
    for number in range(arguments.groups * size):
        sizes = prompt, arguments.reply
        one = make_trajectory(random, step, number, sizes, vocab=vocab, group_size=size)
        if number % size:
            beginning = found[number - number % size].token_ids[:prompt]
            ids = np.concatenate([beginning, one.token_ids[prompt:]])
            one = dataclasses.replace(one, token_ids=ids)
        found.append(one)
    return Batch(step, f"batch-{step}", tuple(found))


def computed(batch: Batch) -> int:
    """Returns the tokens that are computed when each prompt is computed once in the whole step."""
    prompts = {one.group_id: one.run_lengths[0] - 1 for one in batch.trajectories}
    own = sum(len(one.token_ids) - prompts[one.group_id] for one in batch.trajectories)
    return own + sum(prompts.values())


def compare(arguments: argparse.Namespace, folder: Path) -> list[dict[str, object]]:
    """Returns the times of both steps for each length of the prompt."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    longest = max(arguments.prompts) + arguments.reply
    tokens = max(arguments.micro_batch_tokens, longest)
    load = dataclasses.replace(
        LOADS[arguments.shape], micro_batch_tokens=tokens, group_size=arguments.group_size
    )
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
    found = []
    for prompt in arguments.prompts:
        batch = group_batch(arguments, prompt, SHAPES[arguments.shape].vocab, 0)
        measure.progress(f"prompts of {prompt}: {len(batch.trajectories)} sequences")
        found.append(one_length(steps, batch, arguments, policy.ranks.device) | {"prompt": prompt})
        if arguments.profile:
            for name, step in steps.items():
                with torch.profiler.profile(with_stack=False) as profile:
                    step.run(batch)
                    synchronize(policy.ranks.device)
                text = profile.key_averages().table(sort_by="cuda_time_total", row_limit=25)
                print(name, prompt, text, sep="\n")
    policy.ranks.close()
    return found


def one_length(
    steps: dict[str, object], batch: Batch, arguments: argparse.Namespace, device: torch.device
) -> dict[str, object]:
    from slipstream.learner.trainer.step import TrainingStep

    times: dict[str, list[float]] = {name: [] for name in steps}
    metrics: dict[str, dict[str, float]] = {}
    peaks: dict[str, float] = {}
    for repeat in range(-WARMUP_STEPS, arguments.repeats):
        for name, step in steps.items():
            assert isinstance(step, TrainingStep)
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
    whole = sum(len(one.token_ids) for one in batch.trajectories)
    return {
        "times_ms": times,
        "peak_gib": peaks,
        "tokens": whole,
        "token_share": computed(batch) / whole,
        "metrics": {name: {k: m[k] for k in ("loss", "grad_norm")} for name, m in metrics.items()},
    }


def rows(found: Sequence[dict[str, object]]) -> list[list[object]]:
    """Returns a row for each length: times, their ratio and the limit."""
    lines: list[list[object]] = []
    for one in found:
        times = one["times_ms"]
        assert isinstance(times, dict)
        spreads = {name: measure.Spread.of(values) for name, values in times.items()}
        ratio = spreads[WITH].median / spreads[WITHOUT].median
        share = float(str(one["token_share"]))
        lines.append(
            [
                one["prompt"],
                spreads[WITHOUT].text(1),
                spreads[WITH].text(1),
                f"{ratio:.3f}",
                f"{share:.3f}",
                f"{ratio / share:.2f}",
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
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    is_small = arguments.shape == "tiny"
    arguments.prompts = arguments.prompts or ([64, 256] if is_small else [128, 2048])
    arguments.reply = arguments.reply or (64 if is_small else 512)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    with tempfile.TemporaryDirectory() as folder:
        found = compare(arguments, Path(folder))
    header = ["prompt", "without, ms (min-max)", "shared, ms (min-max)", "ratio", "tokens left"]
    table = measure.table([*header, "ratio / tokens left"], rows(found))
    record = {"settings": measure.settings_of(arguments), "table": table, "lengths": found}
    record["attention"] = chosen_attention()
    measure.write_result(f"shared-prompts-{arguments.shape}", record, arguments.out)
    print("\n".join([*table, f"attention: {record['attention']}"]))
    for one in found:
        print(one["prompt"], one["metrics"], one["peak_gib"])


if __name__ == "__main__":
    main()
