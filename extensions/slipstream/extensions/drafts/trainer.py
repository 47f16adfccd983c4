"""Trains the layer that drafts on rollout servers, beside the policy, by what was sampled.

Consumes: the policy's last hidden states in a training step, without their gradients, and the
sampled tokens behind them. Produces: new values of the layer, which are published with the policy's
weights. Waits for: the other ranks, in collectives.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from slipstream.core.settings.config import Config
from slipstream.extensions.drafts.layer import DraftLayer, draft_states
from slipstream.extensions.drafts.settings import DraftsSection
from slipstream.learner.trainer.batches.training_sequence import MicroBatch, TrainingSequence
from slipstream.learner.trainer.model.logprobs import vocab_parallel_logprobs
from slipstream.learner.trainer.model.model import MemoryPart, unwrapped
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart
from slipstream.learner.trainer.step_cost import StageTimes
from torch import Tensor

# Rows of a window; attention does not look beyond it. Windows of one update, and passes over all.
WINDOW_ROWS = 256
WINDOWS = 16
PASSES = 2
# The later tokens of a draft count less: they are reached less often.
LATER = 0.8


class DraftTraining(StepPart):
    """Trains the layer after each step of the policy; every method but `observe` is collective."""

    def __init__(
        self,
        layer: DraftLayer,
        policy: Policy,
        config: Config,
    ) -> None:
        settings = config.top_table("drafts", DraftsSection)
        assert settings is not None
        self._layer = layer
        self._policy = policy
        self._settings = settings
        # Drafts are sampled at the temperature of the tokens that they stand for.
        self._projection = policy.projection(config.sampling.temperature)
        # States, tokens, positions, sequences and loss masks.
        self._seen: list[tuple[Tensor, ...]] = []
        self._num_seen = 0
        # Updates whose gradient was not finite, since the trainer's start.
        self._num_refused = 0

    def begins(self) -> None:
        """Forgets what was seen in earlier steps."""
        self._seen = []
        self._num_seen = 0

    def observe(self, micro_batch: MicroBatch, hidden: Tensor) -> None:
        """Keeps states [tokens, hidden size] of a micro batch, as many as the settings allow."""
        room = self._settings.trained_tokens - self._num_seen
        if room <= 0:
            return
        batch = micro_batch
        fields = (hidden, batch.token_ids, batch.position_ids, batch.sequence_ids, batch.loss_mask)
        self._seen.append(tuple(values[:room].clone() for values in fields))
        self._num_seen += min(room, len(hidden))

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        stages: StageTimes,
    ) -> dict[str, float]:
        """Updates the layer by what was seen; returns its loss in nats a token, by depth."""
        with stages.measure("drafts"), self._policy.memory.resident(MemoryPart.PARAMETERS):
            # Otherwise a replica would see new embeddings and output weights only in its own share.
            self._policy.gather_parameters()
            windows = self._windows()
            number = int(self._policy.ranks.max(torch.tensor([float(len(windows))])).item())
            totals = torch.zeros(2, self._settings.tokens, dtype=torch.float64)
            for number_of_pass in range(PASSES):
                for start in range(0, number, WINDOWS):
                    pass_totals = self._update(windows[start : start + WINDOWS])
                    # Later the layer has seen the tokens.
                    totals += pass_totals if number_of_pass == 0 else 0.0
        losses, counts = totals
        return {
            f"draft_loss_{place}": float(loss / count)
            for place, (loss, count) in enumerate(zip(losses, counts, strict=True), 1)
            if count
        } | {"draft_refused_updates": float(self._num_refused)}

    def _windows(self) -> list[tuple[Tensor, ...]]:
        """Returns hidden states, tokens and loss masks of runs of adjacent tokens."""
        windows: list[tuple[Tensor, ...]] = []
        for hidden, token_ids, positions, sequences, mask in self._seen:
            is_next = (positions.diff() == 1) & (sequences.diff() == 0)
            ends = [place for place, follows in enumerate(is_next.tolist(), 1) if not follows]
            is_trained = mask.tolist()
            for start, end in zip([0, *ends], [*ends, len(positions)], strict=True):
                # A row needs the next token, and predicts the one after it.
                for first in range(start, end - 2, WINDOW_ROWS):
                    part = slice(first, min(first + WINDOW_ROWS + 2, end))
                    if any(is_trained[part.start + 1 : part.stop - 1]):
                        windows.append((hidden[part], token_ids[part], mask[part]))
        self.begins()
        return windows

    def _update(self, windows: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Makes one update by the windows of all ranks; returns sums of losses, and their numbers.

        The result is float64 [2, tokens of a draft].
        """
        layer = self._layer
        policy = self._policy
        depth = self._settings.tokens
        tp_group = policy.ranks.tp_group
        sums = torch.zeros(2, depth, dtype=torch.float64)
        gradient = torch.zeros_like(layer.values)
        if windows:
            hidden, token_ids, mask = (
                torch.nn.utils.rnn.pad_sequence(list(rows_of_windows), batch_first=True)
                for rows_of_windows in zip(*windows, strict=True)
            )
            is_trained = mask[:, 1:-1].clone()
            with torch.enable_grad():
                weights = {
                    name: value.to(policy.dtype)
                    for name, value in layer.named(layer.values).items()
                }
                states = draft_states(
                    weights,
                    layer.shape,
                    self._embedded(token_ids[:, 1:-1]),
                    hidden[:, :-2],
                    depth,
                )
                total = gradient.new_zeros(())
                for place, state in enumerate(states):
                    is_trained[:, :place] = False
                    rows = is_trained.flatten().nonzero()[:, 0]
                    if not len(rows):
                        continue
                    logprobs, _ = vocab_parallel_logprobs(
                        copy_to_tensor_model_parallel_region(state.flatten(0, 1), tp_group),
                        policy.output_weight.detach(),
                        token_ids[:, 2:].flatten(),
                        rows,
                        self._projection,
                    )
                    loss = -logprobs.sum()
                    total = total + LATER**place * loss
                    sums[0, place], sums[1, place] = loss.detach().double().cpu(), len(rows)
                (gradient,) = torch.autograd.grad(total, layer.values)
        if not policy.ranks.counts:
            gradient.zero_()
            sums.zero_()
        # Over all ranks, so that the sum is the same on each, whatever the order of its parts.
        counted = torch.cat([gradient, gradient.new_tensor([sums[1, 0]])])
        dist.all_reduce(counted)
        mean = counted[:-1] / counted[-1].clamp(min=1.0)
        if not layer.update(mean, self._settings.learning_rate):
            self._num_refused += 1
        return policy.ranks.sum(sums)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Returns the embeddings of tokens, of which each tensor parallel rank has some rows."""
        table = unwrapped(self._policy.chunks[0]).embedding.word_embeddings.weight.detach()
        tp_group = self._policy.ranks.tp_group
        local_ids = token_ids - dist.get_rank(tp_group) * len(table)
        is_here = (local_ids >= 0) & (local_ids < len(table))
        embeddings = F.embedding(local_ids.where(is_here, 0), table) * is_here[..., None]
        summed: Tensor = reduce_from_tensor_model_parallel_region(embeddings, tp_group)
        return summed


def step_part(config: Config, policy: Policy) -> DraftTraining:
    """Returns the part that trains the layer."""
    assert isinstance(policy.drafts, DraftLayer)
    return DraftTraining(policy.drafts, policy, config)
