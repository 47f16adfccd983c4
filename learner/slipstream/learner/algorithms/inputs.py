"""The inputs and results of losses and weights: the tokens of one micro batch on one rank.

    def loss(tokens: LossInputs, *, ...) -> TokenTerms | Tensor
    def weight(tokens: LossInputs, *, ...) -> TokenWeights | Tensor

Both are pure functions. The keyword-only parameters are arguments from the configuration, checked
by their annotations.
"""

import math
from collections.abc import Callable, Mapping, Sequence
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

    @classmethod
    def joined(
        cls, parts: Sequence["SequenceSums"], group: dist.ProcessGroup | None = None
    ) -> "SequenceSums":
        """Returns those of several micro batches, whose sequences differ, as one."""
        ids = []
        masks = []
        number = 0
        for part in parts:
            ids.append(part._ids + number)
            masks.append(part._mask)
            number += part._number
        return cls(
            torch.cat(ids),
            torch.cat(masks),
            number,
            group,
        )

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


class BatchSums:
    """Numbers of all trained tokens of the mini-batch, whatever the layout; they have no gradient.

    A function that asks for one is called for the whole mini-batch before it is called for each
    micro batch, where `RecordedSums` gives the same numbers; this costs another forward pass.
    Collective over `group`: each function asks for the same numbers in the same order each time.
    """

    def __init__(
        self,
        mask: Tensor,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Takes the trained tokens, bool [tokens], of one rank, and the ranks that have others."""
        self._mask = mask
        self._group = group if group is not None and group.size() > 1 else None
        # The numbers that were asked for, in order.
        self.asked: list[Tensor] = []

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [tokens] over all trained tokens, a float64 number."""
        return self._ask(values, self._sum)

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean of `values` [tokens] over all trained tokens; 0 if none is trained."""
        ones = torch.ones_like(values)
        total = self.sum(values)
        number = self.sum(ones)
        return total / number.clamp(min=1)

    def sorted(self, values: Tensor) -> Tensor:
        """Returns `values` of all trained tokens, ascending: float64 [trained tokens]."""
        return self._ask(values, self._sorted)

    def quantile(self, values: Tensor, share: float) -> Tensor:
        """Returns the smallest value that at least `share` of all trained tokens do not exceed.

        It is a float64 number, 0 if no token is trained. `share` is from 0 to 1.
        """
        ascending = self.sorted(values)
        number = len(ascending)
        if not number:
            return ascending.new_zeros(())
        # A product such as 0.2 * 15 is rounded up.
        place = math.ceil(share * number - 1e-9) - 1
        return ascending[max(place, 0)]

    def ranks(self, values: Tensor) -> Tensor:
        """Returns for each token how many trained tokens have a smaller value, int64 [tokens]."""
        ascending = self.sorted(values)
        precise = values.detach().double()
        return torch.searchsorted(ascending, precise.contiguous())

    def _ask(self, values: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        trained = values.detach()[self._mask]
        number = compute(trained.double())
        self.asked.append(number)
        return number.clone()

    def _sum(self, trained: Tensor) -> Tensor:
        total = trained.sum()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total

    def _sorted(self, trained: Tensor) -> Tensor:
        if self._group is None:
            return trained.sort().values
        # Ranks have unequal numbers of tokens.
        size = torch.tensor([len(trained)], device=trained.device)
        sizes = self._of_all_ranks(size)
        longest = max(int(size) for size in sizes)
        padded = trained.new_zeros(longest)
        padded[: len(trained)] = trained
        parts = self._of_all_ranks(padded)
        trained_parts = []
        for part, size in zip(parts, sizes, strict=True):
            trained_parts.append(part[: int(size)])
        return torch.cat(trained_parts).sort().values

    def _of_all_ranks(self, part: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which have one shape."""
        assert self._group is not None
        parts = [torch.zeros_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part, group=self._group)
        return parts


class RecordedSums(BatchSums):
    """The numbers that `BatchSums` gave for the whole mini-batch, in the same order."""

    def __init__(
        self,
        mask: Tensor,
        recorded: Sequence[Tensor],
    ) -> None:
        super().__init__(mask)
        self._recorded = recorded

    def _ask(self, values: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        place = len(self.asked)
        if place >= len(self._recorded):
            raise ValueError(
                f"number {place + 1} of tokens.batch is not known here: a function asks for the "
                "same numbers in each call, and in a client's own loop for none"
            )
        number = self._recorded[place]
        self.asked.append(number)
        return number.clone()


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
    # Sums, means, quantiles and ranks over all trained tokens of the mini-batch.
    batch: BatchSums
    # Log-probabilities by the learner with the weights that sampled the token, which are those of
    # `proximal_logprobs` at lag 0 and at given tokens; None unless `algorithm.weight` reads them.
    version_logprobs: Tensor | None = None

    @classmethod
    def joined(
        cls,
        parts: Sequence["LossInputs"],
        *,
        cp_group: dist.ProcessGroup | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> "LossInputs":
        """Returns the tokens of all micro batches of a rank, without gradients, as one.

        Sequences are shared over `cp_group`, and the mini-batch over `group`.
        """
        fields: dict[str, Tensor] = {}
        for name, value in vars(parts[0]).items():
            if isinstance(value, Tensor):
                tensors = [getattr(part, name) for part in parts]
                fields[name] = torch.cat(tensors).detach()
        reference = fields.pop("reference_logprobs", None)
        sequences = [part.sequences for part in parts]
        return cls(
            **fields,
            reference_logprobs=reference,
            sequences=SequenceSums.joined(sequences, cp_group),
            batch=BatchSums(fields["mask"], group),
        )


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
