"""The critic: its values for the tokens of a batch, and its training towards the returns."""

import functools
import math
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
import torch.nn.functional as F
from slipstream.core.errors import UntrainableBatch
from slipstream.core.settings.config import Config
from slipstream.core.types import LogprobArray
from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.memory import Part
from slipstream.learner.trainer.model.schedule import run_schedule
from slipstream.learner.trainer.model.shares import batch_outputs, rank_micro_batches
from slipstream.learner.trainer.opening import load_trained
from slipstream.learner.trainer.ranks.parallel import Ranks
from torch import Tensor

# Standard deviation of the initial values for any hidden size: the states are normalised.
INITIAL_SCALE = 0.1


class ValueSum(IntEnum):
    """Indices of the sums over the trained tokens that `value_loss` returns."""

    LOSS = 0
    TOKENS = 1
    CLIPPED = 2
    VALUE = 3


class Critic:
    """The critic model; every method is collective and itself puts the model's layout in force."""

    def __init__(self, settings: Config, ranks: Ranks) -> None:
        """Loads the model; `settings` must come from `critic_config`."""
        assert settings.critic is not None
        self._settings = settings
        self._clip = settings.critic.value_clip
        self._learning_rate = settings.critic.learning_rate
        # Forward and backward passes over a mini-batch of the newest `train`.
        self._num_passes = 0
        self._ranks = ranks.placed(settings.learner.parallel)
        with self._ranks.in_force():
            change = functools.partial(_with_value_heads, seed=settings.run.seed)
            self.model = load_trained(settings, self._ranks, change=change)

    def values(self, batch: Batch) -> list[LogprobArray]:
        """Returns, for each trajectory, the expected return before each sampled token; float32."""
        with self._ranks.in_force():
            return batch_outputs(
                self.model,
                batch,
                self._forward,
                max_tokens=self._settings.learner.micro_batch_tokens,
            )

    def train(
        self, sequences: Sequence[TrainingSequence], mini_batches: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Takes one optimizer step per mini-batch towards the returns; returns metrics.

        `mini_batches` has the indices into `sequences` of each mini-batch. Raises UntrainableBatch
        for a loss or gradient that is not finite, before that mini-batch changes a weight.
        """
        total = torch.zeros(len(ValueSum), dtype=torch.float64)
        norms = []
        self._num_passes = 0
        parts = self.model.memory.resident(Part.PARAMETERS, Part.GRADIENTS)
        with self._ranks.in_force(), parts:
            for members in mini_batches:
                gradients = functools.partial(self._accumulate, sequences, members)
                sums = gradients()
                loss = float(sums[ValueSum.LOSS])
                if not math.isfinite(loss):
                    raise UntrainableBatch(
                        f"the critic's loss is {loss}; its weights were not changed"
                    )
                norms.append(self.model.optimizer_step(self._learning_rate, gradients))
                total += sums
            # Otherwise the next forward pass gathers them, and a checkpoint before it would hold
            # old parameters.
            self.model.gather_parameters()
        tokens = max(1.0, float(total[ValueSum.TOKENS]))
        values, returns = [], []
        for sequence in sequences:
            assert sequence.values is not None
            assert sequence.returns is not None
            values.append(sequence.values[sequence.loss_mask])
            returns.append(sequence.returns[sequence.loss_mask])
        found = {
            "value_loss": float(total[ValueSum.LOSS]) / tokens,
            "value_clip_fraction": float(total[ValueSum.CLIPPED]) / tokens,
            "value_mean": float(total[ValueSum.VALUE]) / tokens,
            "critic_grad_norm": sum(norms) / len(norms),
            # The values before the step, over the trained tokens.
            "explained_variance": explained_variance(
                np.concatenate(values), np.concatenate(returns)
            ),
        }
        if self.model.scaler is not None:
            found["critic_gradient_overflows"] = float(self._num_passes - len(norms))
        return found

    def _forward(self, share: Sequence[MicroBatch]) -> list[Tensor]:
        def finish(
            place: int, micro_batch: MicroBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            values = output[0, :, 0]
            return values.sum(), micro_batch.loss_mask.sum().to(torch.int), values

        with torch.no_grad():
            return run_schedule(self.model, share, finish, forward_only=True)

    def _accumulate(self, sequences: Sequence[TrainingSequence], members: Sequence[int]) -> Tensor:
        """Accumulates one mini-batch's gradients; returns its `ValueSum`s over all ranks."""

        def finish(
            place: int, micro_batch: MicroBatch, output: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            loss, sums = value_loss(output[0, :, 0], micro_batch, clip=self._clip)
            return loss, micro_batch.loss_mask.sum().to(torch.int), sums

        share = rank_micro_batches(
            self.model, sequences, members, max_tokens=self._settings.learner.micro_batch_tokens
        )
        self._num_passes += 1
        self.model.zero_grad()
        found = run_schedule(self.model, share, finish, forward_only=False)
        sums = torch.zeros(len(ValueSum), dtype=torch.float64)
        if self._ranks.counts:
            sums += sum(part.cpu() for part in found)
        return self._ranks.sum(sums)


def value_loss(values: Tensor, micro_batch: MicroBatch, *, clip: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of `values` [tokens], summed over `loss_mask`, and the `ValueSum`s.

    The loss of a token is half the squared error of its value. If the value differs by more than
    `clip` from the old value, it is also clipped to this distance, and the larger error is used, so
    that a value gains nothing by a larger distance. `clip` 0 turns this off. The sums are detached
    float64, indexed by `ValueSum`; CLIPPED counts tokens whose error was larger after clipping.
    Source: PPO's reference implementation, Huang et al., "The 37 implementation details of PPO"
    (2022), 9.
    """
    mask, old, returns = micro_batch.loss_mask, micro_batch.values, micro_batch.returns
    assert old is not None
    assert returns is not None
    errors = (values - returns).square()
    bounded = errors
    if clip:
        bounded = (values.clamp(old - clip, old + clip) - returns).square()
    losses = torch.where(mask, 0.5 * torch.maximum(errors, bounded), 0.0)
    with torch.no_grad():
        columns = {
            ValueSum.LOSS: losses,
            ValueSum.TOKENS: mask,
            ValueSum.CLIPPED: (bounded > errors) & mask,
            ValueSum.VALUE: torch.where(mask, values, 0.0),
        }
        sums = torch.stack([columns[name].sum(dtype=torch.float64) for name in ValueSum])
    return losses.sum(), sums


def explained_variance(values: LogprobArray, returns: LogprobArray) -> float:
    """Returns 1 - var(returns - values) / var(returns): 1 is perfect, 0 as good as a constant.

    Returns 0 if the returns do not vary or are empty.
    """
    variance = float(returns.astype(np.float64).var()) if returns.size else 0.0
    if variance == 0.0:
        return 0.0
    return 1.0 - float((returns.astype(np.float64) - values).var()) / variance


class ValueHead(torch.nn.Module):
    """A linear layer to one value per token, the same on all ranks of a stage; computes in float32.

    Megatron calls it as an output layer: [tokens, batch, hidden size] gives [tokens, batch, 1].
    With sequence parallelism each rank computes the values of its own tokens. The values are then
    gathered, and the gradients are summed over the tensor parallel ranks.
    """

    def __init__(self, config: Megatron, *, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = INITIAL_SCALE / math.sqrt(config.hidden_size)
        start = torch.randn(1, config.hidden_size, generator=generator) * scale
        self.weight = torch.nn.Parameter(start.to(device, config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device, dtype=config.params_dtype))
        # An output layer has Adam where matrices have Muon.
        self.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
        self._is_split = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Returns the values, and None in place of a bias that Megatron would add."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self._is_split:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss from the gathered values: its own part of the
            # gradient is complete.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def _with_value_heads(chunks: list[Megatron], *, seed: int) -> list[Megatron]:
    """Replaces the output layer of `chunks`, whose weights are loaded, by a value head."""
    for chunk in chunks:
        if chunk.pre_process:
            # With tied embeddings the projection was a second copy: without it no gradients of a
            # copy are added.
            chunk.embedding.word_embeddings.weight.shared_embedding = False
        chunk.share_embeddings_and_output_weights = False
        if chunk.post_process:
            device = next(chunk.decoder.parameters()).device
            chunk.output_layer = ValueHead(chunk.config, seed=seed, device=device)
    return chunks
