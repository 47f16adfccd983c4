r"""Trains one long sequence over context parallel ranks, with recomputation planned by memory.

The model is a random Qwen3 with YaRN: a quarter of the tokens is its original length. Each group
is one sequence of `--tokens` tokens and a short one. The first step measures and recomputes all
layers but one. Later steps have the plan; the table has the memory that it foresaw beside the
measured one.

    python benchmarks/long_context.py --gpus 2 --tokens 131072
    python benchmarks/long_context.py --gpus 1 --tokens 32768 --memory-fraction 0.2
    python benchmarks/long_context.py --device cpu --gpus 2 --shape tiny --tokens 4096

Prints one table and writes benchmarks/results/long_context-TOKENS-GPUS.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import measure
import numpy as np
import torch
from learner_loops import make_trajectory, synchronize
from shapes import SHAPES
from slipstream.client.launch.preflight import free_port
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.flops import model_sizes, training_flops
from slipstream.learner.trainer.model.attention_choice import chosen_attention
from slipstream.learner.trainer.model.model import Policy, unwrapped

PROMPT_TOKENS, SHORT_REPLY = 128, 16
YARN_FACTOR = 4


@dataclass(frozen=True)
class Row:
    """One step on the rank that used most memory."""

    step: int
    recomputed: int
    seconds: float
    tokens_per_s: float
    tflops: float
    peak_gib: float
    # The peak that the plan foresaw; 0 before it is made, and on a CPU.
    planned_gib: float
    grad_norm: float


def config_of(arguments: argparse.Namespace, folder: Path) -> Config:
    """Returns the settings of a run; writes the model's config.json to `folder`."""
    on_gpu = arguments.device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    values = SHAPES[arguments.shape].config(dtype, arguments.tokens)
    theta = values.pop("rope_theta")
    values["rope_parameters"] = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": float(YARN_FACTOR),
        "original_max_position_embeddings": arguments.tokens // YARN_FACTOR,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    fraction = arguments.memory_fraction
    table = {
        "run": {"name": "benchmark", "steps": 1000},
        "model": {"path": str(folder), "dtype": dtype},
        "algorithm": {
            "group_size": 2,
            "groups_per_step": 1,
            "max_staleness": 1,
            "learning_rate": 1e-6,
        },
        "sampling": {
            "max_reply_tokens": arguments.tokens - PROMPT_TOKENS,
            "max_episode_tokens": arguments.tokens,
        },
        "learner": {
            "world_size": arguments.gpus,
            "micro_batch_tokens": arguments.tokens // arguments.gpus,
            "parallel": {"cp": arguments.gpus},
            "recompute": "auto",
            "use_distributed_optimizer": True,
            "threads": 1 if arguments.device == "cpu" else 4,
            **({"gpu_memory_fraction": fraction} if on_gpu and fraction else {}),
        },
    }
    return parse_config(table, source="the benchmark")


def batch_of(arguments: argparse.Namespace, step: int) -> Batch:
    """Returns a group of one long sequence and one short one."""
    random = np.random.default_rng(step)
    vocab = SHAPES[arguments.shape].vocab
    replies = (arguments.tokens - PROMPT_TOKENS, SHORT_REPLY)
    drawn = [
        make_trajectory(random, step, member, (PROMPT_TOKENS, reply), vocab=vocab, group_size=2)
        for member, reply in enumerate(replies)
    ]
    # With equal rewards nothing would be trained.
    found = [dataclasses.replace(one, reward=float(one.member)) for one in drawn]
    return Batch(step, f"batch-{step}", tuple(found))


def planned_bytes(policy: Policy, tokens: int, before: int) -> int:
    """Returns the peak that the plan expects of a pass over `tokens` tokens of this rank."""
    plan = policy.recompute
    if plan is None or plan.measured is None:
        return 0
    kept = len(unwrapped(policy.chunks[0]).decoder.layers) - plan.num_layers
    # The measured rest holds one layer's activations already.
    return before + int((plan.measured.rest + plan.measured.layer * max(kept - 1, 0)) * tokens)


def run_rank(arguments: argparse.Namespace) -> None:
    """Trains on one rank; the main one writes what it saw to `arguments.rows`."""
    from slipstream.learner.trainer.opening import open_policy
    from slipstream.learner.trainer.ranks.parallel import Launch
    from slipstream.learner.trainer.step import TrainingStep

    on_gpu = arguments.device == "cuda"
    launch = Launch.from_environment()
    with tempfile.TemporaryDirectory() as name:
        config = config_of(arguments, Path(name) / "model")
        sizes = model_sizes(json.loads((config.model.path / "config.json").read_text()))
        policy = open_policy(config, launch, load_weights=False)
    training = TrainingStep(policy, config)
    rows = []
    for step in range(arguments.steps):
        batch = batch_of(arguments, step)
        lengths = [len(one.token_ids) for one in batch.trajectories]
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        result = training.run(batch)
        synchronize(policy.ranks.device)
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        plan = policy.recompute
        planned = planned_bytes(policy, arguments.tokens // arguments.gpus, before) if step else 0
        most = policy.ranks.max(torch.tensor([peak, planned], dtype=torch.float64)) / 2**30
        rows.append(
            Row(
                step=step,
                recomputed=plan.num_layers if plan is not None else 0,
                seconds=seconds,
                tokens_per_s=sum(lengths) / seconds,
                tflops=training_flops(sizes, lengths) / seconds / arguments.gpus / 1e12,
                peak_gib=float(most[0]),
                planned_gib=float(most[1]),
                grad_norm=result.metrics["grad_norm"],
            )
        )
        if policy.ranks.is_main:
            measure.progress(f"{rows[-1]}")
    if policy.ranks.is_main:
        found = {"rows": [asdict(row) for row in rows], "attention": chosen_attention()}
        arguments.rows.write_text(json.dumps(found))
    policy.ranks.close()


def start_ranks(arguments: argparse.Namespace, rows: Path) -> None:
    """Runs this program as all ranks; raises CalledProcessError if one fails."""
    options = [f"--master-port={free_port('127.0.0.1')}", "--master-addr=127.0.0.1"]
    environment = dict(os.environ)
    if arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        # Long tensors of many sizes would leave gaps.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nproc-per-node={arguments.gpus}",
            *options,
            *(__file__, *sys.argv[1:], "--rows", str(rows)),
        ],
        check=True,
        env=environment,
        timeout=arguments.limit_s,
    )


def lines_of(rows: list[Row], layers: int) -> list[str]:
    """Returns the table: the first step, and the median of those with the plan."""
    later = rows[2:] or rows[-1:]

    def line(name: str, those: list[Row]) -> list[str]:
        seconds = statistics.median(row.seconds for row in those)
        speed = statistics.median(row.tokens_per_s for row in those)
        planned = max(row.planned_gib for row in those)
        return [
            name,
            f"{those[-1].recomputed} of {layers}",
            f"{seconds:.2f}",
            f"{speed:,.0f}",
            f"{statistics.median(row.tflops for row in those):.3g}",
            f"{max(row.peak_gib for row in those):.1f}",
            f"{planned:.1f}" if planned else "-",
        ]

    header = ["step", "recomputed layers", "s", "tokens/s", "TFLOP/s a rank", "peak GiB"]
    body = [line("first", rows[:1]), line("later", later)]
    return measure.table([*header, "planned GiB"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="0.6B")
    parser.add_argument("--gpus", type=int, default=2, help="ranks, all context parallel")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--memory-fraction", type=float, help="learner.gpu_memory_fraction")
    parser.add_argument("--limit-s", type=float, default=240.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rows is not None:
        run_rank(arguments)
        return
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rows.json"
        start_ranks(arguments, path)
        found = json.loads(path.read_text())
    rows = [Row(**row) for row in found["rows"]]
    lines = lines_of(rows, SHAPES[arguments.shape].layers)
    record = {"settings": measure.settings_of(arguments), "table": lines, **found}
    name = f"long_context-{arguments.tokens}-{arguments.gpus}"
    measure.write_result(name, record, arguments.out)
    print("\n".join([*lines, f"attention: {found['attention']}"]))


if __name__ == "__main__":
    main()
