"""Packing of sequences of uneven length into micro batches of bounded size: pure functions.

A micro batch is one row of tokens, with its sequences one after the other. Targets stand, like all
else that is known of a token, at the position that predicts it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.routed_experts import ExpertArray
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.training_sequence import (
    FloatArray,
    Item,
    TokenEstimates,
    TrainingSequence,
    joined_or_none,
    predicted,
)
from torch import Tensor

_NOTHING: FloatArray = np.zeros(0, dtype=np.float32)


def build_micro_batch(
    sequences: Sequence[TrainingSequence],
    indices: Sequence[int],
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
) -> MicroBatch:
    """Packs `sequences[i]` for i in `indices`, and filler up to a multiple of `multiple` tokens.

    Each sequence is padded at its end to a multiple of `sequence_multiple`, which must divide
    `multiple`; padding has no loss, and does not affect the tokens before it. Without any
    sequence the micro batch is all filler: it is never empty. `sequences` are all of the step's;
    filler has zeros for each estimate that they have.
    """
    chosen = [_padded(sequences[index], sequence_multiple) for index in indices]
    chosen += filler_to(multiple, sum(map(len, chosen)), sequences)
    ends = np.cumsum([len(sequence) for sequence in chosen])
    token_ids = np.concatenate([sequence.token_ids for sequence in chosen])
    return joined(
        chosen,
        targets=predicted(token_ids, ends),
        starts=[0] * len(chosen),
        places=range(len(chosen)),
        indices=indices,
    )


def joined(
    parts: Sequence[TrainingSequence],
    *,
    targets: npt.NDArray[np.int64],
    starts: Sequence[int],
    places: Sequence[int],
    indices: Sequence[int],
) -> MicroBatch:
    """Joins `parts`, of which part n has the positions from `starts[n]` on of `indices[places[n]]`.

    Filler has the place `len(indices)`. `targets` is [tokens].
    """
    lengths = np.array([len(part) for part in parts])
    ends = np.cumsum(lengths)
    weights = np.array([part.loss_weight for part in parts], dtype=np.float32)
    estimates = [part.estimates for part in parts]
    first = np.repeat(ends - lengths - np.asarray(starts), lengths)
    return MicroBatch(
        token_ids=_tensor(np.concatenate([part.token_ids for part in parts])),
        position_ids=_tensor(np.arange(ends[-1]) - first),
        targets=_tensor(targets),
        loss_mask=_tensor(np.concatenate([part.loss_mask for part in parts])),
        loss_weights=_tensor(np.repeat(weights, lengths)),
        advantages=_tensor(np.concatenate([each.advantages for each in estimates])),
        behavior_logprobs=_tensor(np.concatenate([part.behavior_logprobs for part in parts])),
        lags=_tensor(np.concatenate([part.lags for part in parts])),
        sequence_ids=_tensor(np.repeat(np.asarray(places), lengths)),
        cu_seqlens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        indices=tuple(indices),
        reference_logprobs=_tensor(joined_or_none([e.reference_logprobs for e in estimates])),
        values=_tensor(joined_or_none([e.values for e in estimates])),
        returns=_tensor(joined_or_none([e.returns for e in estimates])),
        top_ids=_tensor(joined_or_none([e.top_ids for e in estimates])),
        top_logprobs=_tensor(joined_or_none([e.top_logprobs for e in estimates])),
        expert_ids=_expert_ids(parts),
        algorithm_ids=_algorithm_ids(parts, lengths),
        images=_images(parts),
    )


def filler_to(
    multiple: int, num_tokens: int, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Returns the filler that completes `num_tokens` to a multiple, at least one token; or none.

    It has no loss, and zeros for each estimate that `sequences` have.
    """
    missing = round_up(max(1, num_tokens), multiple) - num_tokens
    like = sequences[0].estimates if sequences else TokenEstimates(_NOTHING)
    return [_filler(missing, like)] if missing else []


def _images(parts: Sequence[TrainingSequence]) -> ImageInputs | None:
    if not any(part.images for part in parts):
        return None
    return ImageInputs.of([part.images for part in parts], [len(part) for part in parts])


def _algorithm_ids(
    parts: Sequence[TrainingSequence], lengths: npt.NDArray[np.int64]
) -> Tensor | None:
    if not any(part.algorithm for part in parts):
        return None
    return torch.from_numpy(np.repeat(np.array([part.algorithm for part in parts]), lengths))


def _expert_ids(sequences: Sequence[TrainingSequence]) -> Tensor | None:
    """Joins the experts of all tokens; sequences without experts get ids that mean "not known"."""
    known = next((s.expert_ids for s in sequences if s.expert_ids is not None), None)
    if known is None:
        return None
    parts = [
        _unknown_experts(len(sequence), known)
        if sequence.expert_ids is None
        else sequence.expert_ids
        for sequence in sequences
    ]
    joined = np.concatenate(parts)
    # torch supports hardly any operation on unsigned integers of two bytes.
    return torch.from_numpy(joined if joined.dtype == np.uint8 else joined.astype(np.int32))


def _unknown_experts(length: int, like: ExpertArray) -> ExpertArray:
    return np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, dtype=like.dtype)


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _padded(sequence: TrainingSequence, multiple: int) -> TrainingSequence:
    missing = -len(sequence) % multiple
    if not missing:
        return sequence

    def pad(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
        return np.pad(values, [(0, missing), *[(0, 0)] * (values.ndim - 1)])

    experts = sequence.expert_ids
    if experts is not None:
        experts = np.concatenate([experts, _unknown_experts(missing, experts)])
    return dataclasses.replace(
        sequence,
        token_ids=pad(sequence.token_ids),
        loss_mask=pad(sequence.loss_mask),
        behavior_logprobs=pad(sequence.behavior_logprobs),
        lags=pad(sequence.lags),
        estimates=sequence.estimates.map(pad),
        expert_ids=experts,
    )


def _filler(length: int, like: TokenEstimates) -> TrainingSequence:
    """Makes a sequence without loss, with zeros for each estimate that `like` has."""
    nothing = TrainingSequence.of_tokens(np.zeros(length, dtype=np.uint32))
    return dataclasses.replace(
        nothing,
        loss_mask=np.zeros(length, dtype=np.bool_),
        estimates=like.map(lambda known: np.zeros((length, *known.shape[1:]), dtype=known.dtype)),
    )


@overload
def _tensor(array: npt.NDArray[Any]) -> Tensor: ...
@overload
def _tensor(array: npt.NDArray[Any] | None) -> Tensor | None: ...
def _tensor(array: npt.NDArray[Any] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
