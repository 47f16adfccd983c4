"""What a training step costs beside a bare Megatron loop, for the quickstart's tiny model on a CPU.

Ours is `TrainingStep.run` on a batch of trajectories: checks, advantages, planning, packing,
log-probabilities, entropies, the objective and its statistics, optimizer. The peer is a loop as
Megatron's own examples write it: the model computes a plain cross-entropy from `labels`, the
schedule runs it forward and backward, the optimizer steps; its micro batches are ours, packed
beforehand, and it keeps one sum of the loss. Both have the same provider, buffers for gradients,
schedule and optimizer.

    python deploy/make_tiny_model.py models/tiny
    python benchmarks/learner.py --repeats 5

Prints one table and writes benchmarks/results/learner.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.client.preflight import free_port
from slipstream.learner.trainer.batch import Batch
from slipstream.learner.trainer.packing import MicroBatch
from slipstream.protocol.config import Config
from slipstream.protocol.config_file import load_config
from slipstream.protocol.types import (
    GroupId,
    PolicyVersion,
    Purpose,
    ServerId,
    Status,
    Trajectory,
    VersionSpan,
)
from torch import Tensor

HERE = Path(__file__).resolve().parent
WARMUP_STEPS = 10
# "<s>", two letters and "<reply>", as the quickstart's environment asks.
PROMPT_TOKENS = 4
LIMIT = 1.15


def make_batch(config: Config, step: int) -> Batch:
    """As many trajectories as a step of the quickstart has, each of its usual length; random."""
    random = np.random.default_rng(step)
    algorithm, reply = config.algorithm, config.sampling.max_reply_tokens
    trajectories = []
    for group in range(algorithm.groups_per_step):
        for member in range(algorithm.group_size):
            trajectory = Trajectory(
                run_id="benchmark",
                group_id=GroupId(f"group-{step}-{group}"),
                member=member,
                attempt=0,
                server_id=ServerId("server"),
                server_epoch=1,
                environment="echo",
                task_index=group,
                seed=0,
                purpose=Purpose.TRAINING,
                status=Status.COMPLETED,
                token_ids=random.integers(4, 32, PROMPT_TOKENS + reply).astype(np.uint32),
                run_lengths=(PROMPT_TOKENS, reply),
                behavior_logprobs=(-3.4 + 0.1 * random.standard_normal(reply)).astype(np.float32),
                version_spans=(VersionSpan(reply, PolicyVersion(0, step)),),
                reward=float(random.random() < 0.5),
                num_turns=1,
            )
            trajectories.append(trajectory)
    return Batch(step, f"batch-{step}", tuple(trajectories))


class BareLoop:
    """Plain cross-entropy on packed micro batches, with Megatron's own output layer and loss."""

    def __init__(self, config: Config) -> None:
        """Needs the parallel groups of a policy that is open."""
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import get_megatron_optimizer
        from slipstream.learner.trainer import compat
        from slipstream.learner.trainer.recipe import (
            ddp_config_of,
            optimizer_config_of,
            provider_of,
        )

        bridge = compat.install().from_hf_pretrained(str(config.model.path))
        provider = provider_of(bridge, bridge.hf_pretrained.config, config, load_weights=True)
        self.model: list[Any] = provider.provide_distributed_model(
            ddp_config=ddp_config_of(config),
            wrap_with_ddp=True,
            data_parallel_random_init=False,
            use_cpu_initialization=provider.use_cpu_initialization,
            bf16=provider.bf16,
        )
        self.optimizer: Any = get_megatron_optimizer(optimizer_config_of(config), self.model)
        self.model[0].config.finalize_model_grads_func = finalize_model_grads
        self.model[0].config.grad_scale_func = self.optimizer.scale_loss

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """One optimizer step; the mean loss of a token."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(micro_batches),
            model=self.model[0],
            num_microbatches=len(micro_batches),
            seq_length=max(len(micro_batch.token_ids) for micro_batch in micro_batches),
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        total = torch.stack(losses).sum(dim=0)
        return float(total[0] / total[1])


def forward_step(
    data: Iterator[MicroBatch],
    model: Any,  # noqa: ANN401
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    from megatron.core.packed_seq_params import PackedSeqParams

    micro_batch = next(data)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
    output = model(
        micro_batch.token_ids[None],
        micro_batch.position_ids[None],
        None,
        labels=micro_batch.targets[None],
        packed_seq_params=packed,
    )

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mask = micro_batch.loss_mask.float()
        total = (losses.view(-1).float() * mask).sum()
        num_tokens = mask.sum().to(torch.int)
        return total, num_tokens, torch.stack([total.detach(), num_tokens.float()])

    return output, loss


def measure(config: Config, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of a step, wall clock and processor, of each repeat; the two in turns."""
    from slipstream.learner.trainer.model import open_policy
    from slipstream.learner.trainer.parallel import Launch
    from slipstream.learner.trainer.sequences import training_sequences, weighted
    from slipstream.learner.trainer.shares import rank_micro_batches
    from slipstream.learner.trainer.step import TrainingStep

    policy = open_policy(config, Launch(rank=0, world_size=1, local_rank=0))
    training, bare = TrainingStep(policy, config), BareLoop(config)
    batches = [make_batch(config, step) for step in range(arguments.steps)]
    packed = []
    for batch in batches:
        members = batch.mini_batches(1)
        sequences = weighted(training_sequences(batch, config, None), members, config)
        packed.append(
            rank_micro_batches(
                policy, sequences, members[0], max_tokens=config.learner.micro_batch_tokens
            )
        )
    loops: dict[str, Callable[[int], object]] = {
        "slipstream": lambda place: training.run(batches[place]),
        "bare": lambda place: bare.step(packed[place]),
    }
    for step in range(WARMUP_STEPS):
        for run in loops.values():
            run(step % arguments.steps)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loops}
    for _ in range(arguments.repeats):
        for name, run in loops.items():
            wall_s, processor_s = time.perf_counter(), time.process_time()
            for step in range(arguments.steps):
                run(step)
            found[name].append(
                {
                    "wall_ms": 1000 * (time.perf_counter() - wall_s) / arguments.steps,
                    "cpu_ms": 1000 * (time.process_time() - processor_s) / arguments.steps,
                }
            )
    policy.ranks.close()
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| loop | wall ms/step (min-max) | CPU ms/step | wall ratio | CPU ratio |"]
    lines.append("|---|---|---|---|---|")
    base = {key: median(found["bare"], key) for key in ("wall_ms", "cpu_ms")}
    for name, repeats in found.items():
        walls = [repeat["wall_ms"] for repeat in repeats]
        wall, cpu = median(repeats, "wall_ms"), median(repeats, "cpu_ms")
        lines.append(
            f"| {name} | {wall:.2f} ({min(walls):.2f}-{max(walls):.2f}) | {cpu:.2f} "
            f"| {wall / base['wall_ms']:.3f} | {cpu / base['cpu_ms']:.3f} |"
        )
    return "\n".join([*lines, f"| limit | | | {LIMIT} | |"])


def median(repeats: list[dict[str, float]], key: str) -> float:
    return statistics.median(repeat[key] for repeat in repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, default=HERE.parent / "deploy/configs/quickstart.toml"
    )
    parser.add_argument("--model", type=Path, default=HERE.parent / "models/tiny")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each loop in one repeat")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "learner.json")
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    overrides = [f'model.path="{arguments.model}"', f"learner.threads={arguments.threads}"]
    config = load_config(arguments.config, overrides)
    found = measure(config, arguments)
    arguments.output.parent.mkdir(exist_ok=True)
    machine = {"machine": platform.machine(), "processors": os.cpu_count()}
    machine |= {name: version(name) for name in ("torch", "megatron-core", "megatron-bridge")}
    settings = {"repeats": arguments.repeats, "steps": arguments.steps}
    settings |= {"threads": arguments.threads}
    arguments.output.write_text(
        json.dumps({"machine": machine, "settings": settings, "loops": found}, indent=2) + "\n"
    )
    print(table(found))


if __name__ == "__main__":
    main()
