"""The value head: one value for each token, in place of the projection to the vocabulary."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from slipstream.learner.trainer.untyped import Megatron
from torch import Tensor

# Standard deviation of the initial values for any hidden size: the states are normalised.
INITIAL_SCALE = 0.1


class ValueHead(torch.nn.Module):
    """A linear layer to one number, the same on all ranks of a stage; float32 inside.

    Megatron calls it as an output layer: [tokens, batch, hidden size] gives [tokens, batch, 1].
    With sequence parallelism a rank has a part of the tokens: it computes their values, and values
    are gathered instead of states. Gradients are then summed over the tensor parallel ranks.
    """

    def __init__(self, config: Megatron, *, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = INITIAL_SCALE / math.sqrt(config.hidden_size)
        start = torch.randn(1, config.hidden_size, generator=generator) * scale
        self.weight = torch.nn.Parameter(start.to(device, config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, device=device, dtype=config.params_dtype))
        self._is_split = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, None]:
        """Returns the values, and None for a bias that Megatron would add later."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self._is_split:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss from the gathered values: its own part of the
            # gradient
            # is complete.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def give_value_head(model: Megatron, *, seed: int) -> None:
    """Gives a Megatron GPT model with loaded weights a value head; call it on every stage."""
    if model.pre_process:
        # With tied embeddings the projection was a second copy; now no gradients of a copy are to
        # be added.
        model.embedding.word_embeddings.weight.shared_embedding = False
    model.share_embeddings_and_output_weights = False
    if model.post_process:
        device = next(model.decoder.parameters()).device
        model.output_layer = ValueHead(model.config, seed=seed, device=device)
