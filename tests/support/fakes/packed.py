"""Micro batches and settings of the algorithm, from lists."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from pydantic import JsonValue
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.functions import function_of
from slipstream.learner.algorithms.inputs import (
    BatchSums,
    LossInputs,
    SequenceSums,
    TokenTerms,
    TokenWeights,
)
from slipstream.learner.algorithms.losses import token_terms, token_weights
from slipstream.learner.trainer.batches.training_sequence import (
    MicroBatch,
    Segment,
    TrainingSequence,
)
from slipstream.learner.trainer.model.schedule import build_micro_batch
from torch import Tensor


def algorithm(**changes: JsonValue) -> AlgorithmSection:
    settings = {"group_size": 4, "groups_per_step": 2, "learning_rate": 1e-3}
    return AlgorithmSection.model_validate(settings | changes)


def packed(
    sequences: Sequence[TrainingSequence], indices: Iterable[int], **multiples: int
) -> MicroBatch:
    """The micro batch of the whole sequences at `indices`."""
    segments = [Segment(index, 0, len(sequences[index])) for index in indices]
    return build_micro_batch(sequences, segments, **multiples)


def micro_batch(
    behavior: Sequence[float],
    advantages: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    *,
    lags: Sequence[int] | None = None,
    sequence_ids: Sequence[int] | None = None,
    loss_weights: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
) -> MicroBatch:
    """One sequence unless `sequence_ids` says otherwise; every token is trained unless `mask`."""
    number = len(behavior)
    nothing = torch.zeros(number, dtype=torch.int64)
    ids = torch.tensor(sequence_ids if sequence_ids is not None else [0] * number)
    return MicroBatch(
        token_ids=nothing,
        position_ids=nothing,
        targets=nothing,
        loss_mask=torch.tensor(mask if mask is not None else [True] * number),
        loss_weights=torch.tensor(
            loss_weights if loss_weights is not None else [1.0] * number
        ),
        advantages=torch.tensor(
            advantages if advantages is not None else [1.0] * number
        ),
        behavior_logprobs=torch.tensor(behavior),
        lags=torch.tensor(lags if lags is not None else [0] * number),
        sequence_ids=ids,
        is_padding=torch.zeros(number, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, number], dtype=torch.int32),
        max_seqlen=number,
        indices=tuple(range(int(ids.max()) + 1)),
        reference_logprobs=None if reference is None else torch.tensor(reference),
    )


def loss_inputs(
    policy: Tensor,
    proximal: Tensor,
    advantages: Tensor | None = None,
    *,
    behavior: Tensor | None = None,
    versions: Tensor | None = None,
    sequence_ids: Sequence[int] | None = None,
) -> LossInputs:
    """Tokens of one sequence unless `sequence_ids` says otherwise, all trained."""
    nothing = torch.zeros(len(policy), dtype=torch.int32)
    mask = torch.ones(len(policy), dtype=torch.bool)
    ids = torch.tensor(sequence_ids if sequence_ids is not None else [0] * len(policy))
    return LossInputs(
        logprobs=policy,
        proximal_logprobs=proximal,
        behavior_logprobs=proximal if behavior is None else behavior,
        advantages=torch.ones(len(policy)) if advantages is None else advantages,
        mask=mask,
        is_given=~mask,
        lags=nothing,
        versions=nothing,
        reference_logprobs=None,
        entropy=torch.zeros(len(policy)),
        sequences=SequenceSums(ids, mask, int(ids.max()) + 1),
        batch=BatchSums(mask),
        version_logprobs=versions,
    )


def terms_of(settings: AlgorithmSection, tokens: LossInputs) -> TokenTerms:
    """The losses of the tokens by `settings.loss`."""
    return token_terms(function_of(settings, "loss"), tokens, "a test")


def weights_of(settings: AlgorithmSection, tokens: LossInputs) -> TokenWeights:
    """The weights of the tokens by `settings.weight`."""
    return token_weights(function_of(settings, "weight"), tokens, "a test")


def sequence(
    tokens: Iterable[int], trained: Iterable[int], weight: float = 0.0
) -> TrainingSequence:
    """A sequence that trains the predictions at the places `trained`; values rise by 1 a token."""
    ids = np.array([*tokens], dtype=np.int64)
    values = np.arange(len(ids), dtype=np.float32) + 100 * weight
    return TrainingSequence(
        token_ids=ids,
        targets=np.append(ids[1:], 0),
        loss_mask=np.isin(np.arange(len(ids)), [*trained]),
        behavior_logprobs=-values,
        lags=np.zeros(len(ids), dtype=np.int32),
        advantages=values,
        reference_logprobs=values + 0.5,
        loss_weight=weight,
    )
