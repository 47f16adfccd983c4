"""Models, batches and the bare Megatron loop of the learner's benchmark."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from slipstream.core.configuration.config_file import parse_config
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.settings.config import Config
from slipstream.core.types import (
    GroupId,
    PolicyVersion,
    Trajectory,
    VersionSpan,
)
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import MicroBatch
from slipstream.learner.trainer.model.model import unwrapped
from slipstream.learner.trainer.model.policy import Policy
from support.fakes.plain_trajectory import plain_trajectory
from torch import Tensor

from benchmarks.common.shapes import SHAPES

# The size of the square matrices whose product is the limit.
MATMUL_SIZE = 8192
MAX_POSITIONS = 40960


@dataclass(frozen=True)
class Load:
    """The work of one step of a model: whole groups, packed."""

    layers: int
    micro_batch_tokens: int = 16384
    micro_batches: int = 4
    prompt_tokens: int = 128
    # Mean length of the replies, which is lognormal with a coefficient of variation of 1.
    mean_reply_tokens: int = 1024
    group_size: int = 8


# The load of each shape of `shapes`.
LOADS = {
    "tiny": Load(2, 512, 2, 8, 40),
    "0.6B": Load(28),
    "1.7B": Load(28),
    # 20 of Qwen3-8B's 36 layers: with gradients, optimizer state and the activations of a micro
    # batch they need 134 GiB.
    "8B": Load(20),
}


def shape_config(
    name: str,
    load: Load,
    folder: Path,
    *,
    threads: int,
    fp8: str = "off",
) -> Config:
    """Returns the settings of a run on a model; writes only its config.json to `folder`.

    The model is in bfloat16, on a CPU in float32. `fp8` is `learner.fp8`.
    """
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    shape = dataclasses.replace(SHAPES[name], layers=load.layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(dtype, MAX_POSITIONS)))
    table = {
        "run": {"name": "benchmark", "steps": 1000},
        "model": {"path": str(folder), "dtype": dtype},
        "algorithm": {
            "group_size": load.group_size,
            "groups_per_step": 1,
            "max_staleness": 1,
            "learning_rate": 1e-6,
            "weight_args": {"cap": 2.0},
        },
        "sampling": {
            "max_reply_tokens": load.micro_batch_tokens - load.prompt_tokens,
            "max_episode_tokens": load.micro_batch_tokens,
        },
        "learner": {
            "micro_batch_tokens": load.micro_batch_tokens,
            "ddp": {"use_distributed_optimizer": True},
            "threads": threads,
            "fp8": fp8,
        },
    }
    return parse_config(table, source="benchmark")


def lognormal_batch(load: Load, vocab: int, step: int) -> Batch:
    """Returns whole groups of random tokens that fill 97 percent of a step's micro batches."""
    random = np.random.default_rng(step)
    room = int(0.97 * load.micro_batches * load.micro_batch_tokens)
    sigma = np.sqrt(np.log(2.0))
    trajectories: list[Trajectory] = []
    while True:
        drawn = random.lognormal(np.log(load.mean_reply_tokens) - sigma**2 / 2, sigma, 8)
        replies = np.clip(drawn, 4, load.micro_batch_tokens - load.prompt_tokens).astype(int)
        room -= int(replies.sum()) + load.group_size * load.prompt_tokens
        if room < 0 and trajectories:
            return Batch(step, f"batch-{step}", tuple(trajectories))
        for reply in replies.tolist():
            sizes = load.prompt_tokens, reply
            number = len(trajectories)
            trajectories.append(make_trajectory(random, step, number, sizes, vocab=vocab))


def quickstart_batch(config: Config, step: int) -> Batch:
    """Returns the trajectories of a quickstart step: random tokens, the usual number and length."""
    random = np.random.default_rng(step)
    algorithm = config.algorithm
    # The prompt of the quickstart's environment is "<s>", two letters and "<reply>".
    sizes = 4, config.sampling.max_reply_tokens
    return Batch(
        step,
        f"batch-{step}",
        tuple(
            make_trajectory(random, step, number, sizes, vocab=32, group_size=algorithm.group_size)
            for number in range(algorithm.groups_per_step * algorithm.group_size)
        ),
    )


def make_trajectory(
    random: np.random.Generator,
    step: int,
    number: int,
    sizes: tuple[int, int],
    *,
    vocab: int,
    group_size: int = 8,
) -> Trajectory:
    """Returns trajectory `number` of a step, with a prompt and a reply of `sizes` tokens."""
    prompt, reply = sizes
    logprobs = 0.1 * random.standard_normal(reply) - np.log(vocab - 4)
    return plain_trajectory(
        random.integers(4, vocab, prompt + reply),
        sizes,
        logprobs,
        group_id=GroupId(f"group-{step}-{number // group_size}"),
        member=number % group_size,
        environment="echo",
        task_index=number // group_size,
        version_spans=(VersionSpan(reply, PolicyVersion(0, step)),),
        reward=float(random.random() < 0.5),
        num_turns=1,
    )


def with_kept_tokens(batch: Batch, number: int, vocab: int) -> Batch:
    """Returns the batch with a set of `number` random tokens for each sampled token.

    A set has the token itself, and fewer tokens where one is drawn twice.
    """
    random = np.random.default_rng(batch.step)
    trajectories: list[Trajectory] = []
    for trajectory in batch.trajectories:
        token_ids = trajectory.token_ids[trajectory.sampled_mask()]
        other_ids = random.integers(0, vocab, (len(token_ids), number - 1))
        sets = np.column_stack([token_ids.astype(np.int64), other_ids])
        kept_tokens = KeptTokens.of_sets([[*{*ids}] for ids in sets.tolist()])
        trajectories.append(dataclasses.replace(trajectory, kept_tokens=kept_tokens.packed()))
    return dataclasses.replace(batch, trajectories=tuple(trajectories))


class BareLoop:
    """Plain cross-entropy on packed micro batches, with Megatron's own output layer and loss.

    It trains the chunks of a policy, in turns with the policy's own step: a second model would
    halve the size that fits a GPU.
    """

    def __init__(self, policy: Policy) -> None:
        self._model = policy.chunks
        self._optimizer = policy.optimizer
        # Only the last pipeline stage has one.
        self._output_layer = getattr(unwrapped(policy.chunks[-1]), "output_layer", None)
        if torch.cuda.is_available():
            # On an H200 this is the fastest of Megatron's three losses.
            settings = unwrapped(policy.chunks[-1]).config
            settings.cross_entropy_loss_fusion = True
            settings.cross_entropy_fusion_impl = "te"

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Makes one optimizer step; collective, with each rank's share of the micro batches."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        with self._own_projection():
            for chunk in self._model:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=self._model[0],
                num_microbatches=len(micro_batches),
                seq_length=max(len(micro_batch.token_ids) for micro_batch in micro_batches),
                micro_batch_size=1,
                forward_only=False,
            )
            self._optimizer.step()

    @contextlib.contextmanager
    def _own_projection(self) -> Iterator[None]:
        if self._output_layer is None:
            yield
            return
        # The policy has replaced `forward` on the instance.
        replaced = vars(self._output_layer).pop("forward")
        yield
        self._output_layer.forward = replaced


def packed_as_ours(policy: Policy, config: Config, batch: Batch) -> list[MicroBatch]:
    """Returns this rank's micro batches of a step, packed as ours packs them, on the device."""
    from slipstream.learner.trainer.algorithms.loss import training_sequences, weighted
    from slipstream.learner.trainer.model.schedule import rank_micro_batches

    members = batch.mini_batches(1)
    sequences = weighted(training_sequences(batch, config, None), batch, members, config)
    packed = rank_micro_batches(policy, sequences, members[0])
    return [micro_batch.to(policy.ranks.device) for micro_batch in packed]


def forward_step(
    data: Iterator[MicroBatch],
    model: Any,  # noqa: ANN401
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.parallel_state import get_context_parallel_world_size

    micro_batch = next(data)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=micro_batch.cu_seqlens,
        cu_seqlens_kv=micro_batch.cu_seqlens,
        max_seqlen_q=micro_batch.max_seqlen,
        max_seqlen_kv=micro_batch.max_seqlen,
    )
    if get_context_parallel_world_size() > 1:
        # TransformerEngine requires these fields.
        packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = micro_batch.cu_seqlens
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


def matmul_tflops(device: torch.device) -> float:
    """Returns the TFLOPS of a product of two square random bfloat16 matrices on this device."""
    size, times = (MATMUL_SIZE, 20) if device.type == "cuda" else (256, 3)
    first, second = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    product = first @ second
    synchronize(device)
    started = time.perf_counter()
    for _ in range(times):
        torch.mm(first, second, out=product)
    synchronize(device)
    return 2 * times * size**3 / (time.perf_counter() - started) / 1e12


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
