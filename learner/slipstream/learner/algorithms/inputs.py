"""The inputs and results of losses and weights: the tokens of one micro batch on one rank.

    def loss(tokens: LossInputs, *, ...) -> TokenTerms | Tensor
    def weight(tokens: LossInputs, *, ...) -> TokenWeights | Tensor

Both are pure functions. The keyword-only parameters are arguments from the configuration, checked
by their annotations.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceSums:
    """Sums and means over the trained tokens of each sequence; collective over `group`.

    `group` has the context parallel ranks that share the sequences, or is None if no sequence is
    shared. Sums carry no gradient: the loss uses ratios, weights, masks and lengths of whole
    sequences as constants.
    """

    def __init__(
        self, ids: Tensor, mask: Tensor, number: int, group: dist.ProcessGroup | None = None
    ) -> None:
        """Takes each token's sequence, `ids` [tokens] below `number`, and trained tokens, bool."""
        self._ids = ids
        self._mask = mask
        self._number = number
        self._group = group if group is not None and group.size() > 1 else None

    def sums(self, values: Tensor) -> Tensor:
        """Returns, [tokens], the sum of `values` over the trained tokens of its sequence, or 0."""
        sums = self._sums(values)
        return sums[self._ids].to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Returns, [tokens], the mean of `values` over the trained tokens of its sequence, or 0."""
        means = self._sums(values) / self._sums(self._mask).clamp(min=1)
        return means[self._ids].to(values.dtype)

    @torch.no_grad()
    def _sums(self, values: Tensor) -> Tensor:
        # float64 keeps the order of additions over ranks and tokens from changing a float32 result.
        trained = torch.where(self._mask, values, 0).to(torch.float64)
        sums = torch.zeros(self._number, dtype=torch.float64, device=values.device)
        sums.index_add_(0, self._ids, trained)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        return sums


@dataclass(frozen=True)
class LossInputs:
    """The tokens of one micro batch on one rank, as input of a loss or weight function.

    Tensors are float32 [tokens] unless a comment says otherwise. Only `logprobs` has a gradient.
    Values at tokens outside of `mask` have no meaning.
    """

    # Log-probabilities by the policy that is trained.
    logprobs: Tensor
    # Log-probabilities by the policy before the step.
    proximal_logprobs: Tensor
    # Log-probabilities by the policy that sampled the token; at given tokens those of
    # `proximal_logprobs`.
    behavior_logprobs: Tensor
    advantages: Tensor
    # bool: the tokens that are trained.
    mask: Tensor
    # bool: tokens that the environment gave, so that no policy sampled them.
    is_given: Tensor
    # int32: versions between the sampling of the token and this step.
    lags: Tensor
    # int32: the version that sampled the token.
    versions: Tensor
    # Log-probabilities by the reference model; None in a run without one.
    reference_logprobs: Tensor | None
    # The entropy of the policy that is trained.
    entropy: Tensor
    # Sums and means over the trained tokens of whole sequences, whatever the layout.
    sequences: SequenceSums


@dataclass(frozen=True)
class TokenTerms:
    """The losses of the tokens, before importance weights and without KL and entropy terms.

    Each of the `reports` becomes a metric of its name: the mean over the trained tokens, or the
    largest value if the name ends with `_max`.
    """

    losses: Tensor
    reports: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenWeights:
    """The factors of the tokens in the loss, without a gradient.

    `reports` become metrics as in `TokenTerms`, but leave out given tokens, which no policy
    sampled.
    """

    weights: Tensor
    reports: Mapping[str, Tensor] = field(default_factory=dict)
