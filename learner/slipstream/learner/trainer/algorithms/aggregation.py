"""Aggregation of token losses to one number: the weight of a token of each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.settings.algorithm_section import AggregationKind


def loss_weights(
    num_trained: Sequence[int], kind: AggregationKind, *, fixed_tokens: int
) -> list[float]:
    """Returns, for each sequence of one mini-batch, the weight of each of its tokens.

    `num_trained` has the number of trained tokens of every sequence of the mini-batch, over all
    ranks. The sum of weight * loss over all tokens, divided by all trained tokens N, is
    - `token_mean`: the mean over tokens, DAPO's (arXiv:2503.14476): weight 1;
    - `sequence_mean`: the mean of the means of the S sequences with a trained token, GRPO's
     (arXiv:2402.03300): weight N / (S * n) for a sequence with n trained tokens;
    - `fixed`: the sum over tokens / (all sequences * `fixed_tokens`), Dr. GRPO's
     (arXiv:2503.20783): weight N / (all sequences * `fixed_tokens`). The length of one reply then
     does not affect the weight of another.
    Every rank knows the whole mini-batch, so the weights are the same in every layout, and the
    schedule divides by N in every case.
    """
    total = sum(num_trained)
    match kind:
        case "token_mean":
            return [1.0] * len(num_trained)
        case "sequence_mean":
            counted = sum(number > 0 for number in num_trained)
            return [total / (counted * number) if number else 0.0 for number in num_trained]
        case "fixed":
            return [total / (len(num_trained) * fixed_tokens)] * len(num_trained)
