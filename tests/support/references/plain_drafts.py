"""What a layer drafts, and what a model keeps of it, from whole texts instead of step by step."""

import torch
from slipstream.extensions.drafts.layer import draft_states
from slipstream.extensions.drafts.shape import DraftShape
from torch import Tensor
from transformers import PreTrainedModel


@torch.no_grad()
def kept_counts(
    model: PreTrainedModel,
    shape: DraftShape,
    layer: dict[str, Tensor],
    tokens: list[int],
    *,
    first: int,
    num_tokens: int,
) -> list[int]:
    """How many tokens of each draft of a greedy reply are the model's own, by the learner's layer.

    The reply begins at token `first` of `tokens`. A draft has `num_tokens` tokens.
    """
    hidden = model.model(torch.tensor([tokens])).last_hidden_state
    embedded = model.get_input_embeddings()(torch.tensor([tokens[1:-1]]))
    outputs = draft_states(layer, shape, embedded, hidden[:, :-2], num_tokens)
    drafted = [model.lm_head(output[0]).argmax(-1).tolist() for output in outputs]
    counts = []
    row = first - 1
    while row + num_tokens + 2 < len(tokens):
        right = [drafted[n][row + n] == tokens[row + n + 2] for n in range(num_tokens)]
        counts.append(([*right, False]).index(False))
        row += counts[-1] + 1
    return counts
