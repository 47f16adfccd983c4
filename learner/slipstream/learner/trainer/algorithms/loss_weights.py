"""The weight of each token in the loss of its mini-batch, by aggregation and by environment."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from slipstream.core.environment_rules import PLAIN, environment_rules
from slipstream.core.settings.algorithm_section import AggregationKind
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence


def weighted(
    sequences: Sequence[TrainingSequence],
    batch: Batch,
    mini_batches: Sequence[Sequence[int]],
    config: Config,
) -> list[TrainingSequence]:
    """Returns the sequences with the loss weights of their mini-batches and environments.

    The weight of an environment is a factor of its tokens' losses alone: the numbers by which
    `loss_weights` divides count all tokens and sequences alike.
    """
    changed = list(sequences)
    rules = environment_rules(config)
    owners = batch.owners
    for members in mini_batches:
        weights = loss_weights(
            [int(np.count_nonzero(sequences[index].loss_mask)) for index in members],
            config.algorithm.aggregation,
            fixed_tokens=config.sampling.max_reply_tokens,
        )
        for index, weight in zip(members, weights, strict=True):
            environment = batch.trajectories[owners[index]].environment
            weight *= rules.get(environment, PLAIN).loss_weight
            if weight != changed[index].loss_weight:
                changed[index] = dataclasses.replace(changed[index], loss_weight=weight)
    return changed


def loss_weights(
    num_trained: Sequence[int], kind: AggregationKind, *, fixed_tokens: int
) -> list[float]:
    """Returns, for each sequence of one mini-batch, the weight of each of its tokens.

    `num_trained` has the number of trained tokens of every sequence of the mini-batch, over all
    ranks. The sum of weight * loss over all tokens, divided by all trained tokens N, is
    - for `token_mean` the mean over tokens, as in DAPO (arXiv:2503.14476). The weight is 1.
    - for `sequence_mean` the mean of the means of the S sequences with a trained token, as in GRPO
     (arXiv:2402.03300). The weight is N / (S * n) for a sequence with n trained tokens.
    - for `fixed` the sum over tokens / (number of sequences * `fixed_tokens`), as in Dr. GRPO
     (arXiv:2503.20783). The weight is N / (number of sequences * `fixed_tokens`), so the length of
     one reply does not affect the weight of another.
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
