"""Packing of sequences of uneven length into micro batches of bounded size: pure functions.

A micro batch is one row of tokens, with its sequences one after the other. Position i of a sequence
predicts token i + 1 of the same sequence: targets, loss mask, advantages, behavior
log-probabilities and lags are stored at the position of the prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
from slipstream.learner.trainer.batches.batch import token_lags
from slipstream.learner.trainer.batches.images import ImageInputs, PlacedImage, images_of
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.protocol.routed_experts import ExpertArray
from slipstream.protocol.types import TokenArray, Trajectory
from slipstream.protocol.vision.pixels import ImageProcessor
from torch import Tensor

Item = TypeVar("Item", bound=np.generic)
FloatArray = npt.NDArray[np.float32]
_NOTHING: FloatArray = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class TokenEstimates:
    """Estimates for the sampled tokens of one trajectory, float32 [sampled tokens].

    Advantages come from the rewards. The other estimates come from a reference model and a critic,
    which a run may lack.
    """

    advantages: FloatArray
    # Natural logarithm, at the sampling temperature.
    reference_logprobs: FloatArray | None = None
    # The critic's estimate before each token was sampled, and its target.
    values: FloatArray | None = None
    returns: FloatArray | None = None
    # int64 and float32 [sampled tokens, top k]: the reference's most likely tokens.
    top_ids: npt.NDArray[np.int64] | None = None
    top_logprobs: FloatArray | None = None

    def map(self, change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> TokenEstimates:
        """Returns estimates with `change` applied to every array that is not None."""
        arrays = (None if known is None else change(known) for known in self.arrays[1:])
        return TokenEstimates(change(self.advantages), *arrays)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any] | None, ...]:
        """All arrays, in the order of the fields."""
        return tuple(getattr(self, one.name) for one in dataclasses.fields(self))

    @classmethod
    def map_all(
        cls,
        many: Sequence[TokenEstimates],
        change: Callable[[npt.NDArray[Any]], list[npt.NDArray[Any]]],
    ) -> list[TokenEstimates]:
        """Joins the arrays of `many`, and returns an entry for each part that `change` makes."""
        advantages, *others = zip(*(each.arrays for each in many), strict=True)
        parts = change(np.concatenate(advantages))

        def mapped(arrays: Sequence[npt.NDArray[Any] | None]) -> Sequence[npt.NDArray[Any] | None]:
            joined = _joined_or_none(arrays)
            return [None] * len(parts) if joined is None else change(joined)

        columns = map(mapped, others)
        return [cls(*arrays) for arrays in zip(parts, *columns, strict=True)]


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence with arrays of its length; the last position predicts nothing."""

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    # NaN for a token that no policy sampled: an environment gave it.
    behavior_logprobs: npt.NDArray[np.float32]
    lags: npt.NDArray[np.int32]
    estimates: TokenEstimates
    # Weight of its tokens in the loss.
    loss_weight: float = 1.0
    # Index in `EnvironmentAlgorithms.distinct` of the algorithm that trains it.
    algorithm: int = 0
    # [tokens, layers, experts per token], like `RoutedExperts`; None: no experts are known.
    expert_ids: ExpertArray | None = None
    images: tuple[PlacedImage, ...] = ()

    @classmethod
    def of_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        estimates: Sequence[TokenEstimates],
        *,
        step: int,
        processor: ImageProcessor | None = None,
    ) -> list[TrainingSequence]:
        """Makes sequences that train the sampled tokens, except a first token: nothing predicts it.

        A trajectory gives one sequence, or one for each of its branches. `estimates` has an entry
        for each trajectory; an array is None in all of them or in none. The sequences are views of
        arrays for the whole batch: many small arrays would cost more time than the training of
        short sequences. `processor` makes pixels of images, if the model sees any.
        """
        if not trajectories:
            return []
        parts = [part.tokens for t in trajectories for part in t.sequences()]
        ends = np.cumsum([tokens.stop - tokens.start for tokens in parts])
        sampled = np.repeat(
            [bool(place % 2) for t in trajectories for place in range(len(t.run_lengths))],
            [length for t in trajectories for length in t.run_lengths],
        )
        token_ids = np.concatenate([t.token_ids for t in trajectories]).astype(np.int64)

        def placed(values: npt.NDArray[Item]) -> list[npt.NDArray[Item]]:
            whole = np.zeros((len(sampled), *values.shape[1:]), dtype=values.dtype)
            whole[sampled] = values
            return parts_of(_predicted(whole, ends), ends)

        found = [
            cls(*arrays)
            for arrays in zip(
                parts_of(token_ids, ends),
                parts_of(_predicted(sampled, ends), ends),
                placed(np.concatenate([_behavior(t) for t in trajectories])),
                placed(token_lags(trajectories, step)),
                TokenEstimates.map_all(estimates, placed),
                strict=True,
            )
        ]
        if processor is None:
            return found
        images = [
            images_of(t, part.tokens, processor) for t in trajectories for part in t.sequences()
        ]
        return [
            dataclasses.replace(sequence, images=placed) if placed else sequence
            for sequence, placed in zip(found, images, strict=True)
        ]

    @classmethod
    def of_tokens(cls, token_ids: TokenArray) -> TrainingSequence:
        """Makes a sequence whose loss mask covers all predictions, without a behavior policy."""
        length = len(token_ids)
        return cls(
            token_ids=token_ids.astype(np.int64),
            loss_mask=np.arange(length) < length - 1,
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            lags=np.zeros(length, dtype=np.int32),
            estimates=TokenEstimates(np.zeros(length, dtype=np.float32)),
        )

    def __len__(self) -> int:
        return len(self.token_ids)


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
        targets=_predicted(token_ids, ends),
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
        advantages=_tensor(np.concatenate([one.advantages for one in estimates])),
        behavior_logprobs=_tensor(np.concatenate([part.behavior_logprobs for part in parts])),
        lags=_tensor(np.concatenate([part.lags for part in parts])),
        sequence_ids=_tensor(np.repeat(np.asarray(places), lengths)),
        cu_seqlens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        indices=tuple(indices),
        reference_logprobs=_tensor(_joined_or_none([e.reference_logprobs for e in estimates])),
        values=_tensor(_joined_or_none([e.values for e in estimates])),
        returns=_tensor(_joined_or_none([e.returns for e in estimates])),
        top_ids=_tensor(_joined_or_none([e.top_ids for e in estimates])),
        top_logprobs=_tensor(_joined_or_none([e.top_logprobs for e in estimates])),
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


def _behavior(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    logprobs = trajectory.behavior_logprobs
    return np.full_like(logprobs, np.nan) if trajectory.is_given else logprobs


def _predicted(values: npt.NDArray[Item], ends: npt.NDArray[np.int64]) -> npt.NDArray[Item]:
    """Moves the value of token i + 1 to position i; the last position of each sequence gets 0.

    `ends` has the end of each of the joined sequences.
    """
    moved = np.roll(values, -1, axis=0)
    moved[ends - 1] = 0
    return moved


def parts_of(values: npt.NDArray[Item], ends: npt.NDArray[np.int64]) -> list[npt.NDArray[Item]]:
    """Returns views of the array, cut at `ends`; the last end is the array's length."""
    bounds = [0, *ends.tolist()]
    return [values[start:end] for start, end in itertools.pairwise(bounds)]


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
        estimates=like.map(lambda one: np.zeros((length, *one.shape[1:]), dtype=one.dtype)),
    )


@overload
def _tensor(array: npt.NDArray[Any]) -> Tensor: ...
@overload
def _tensor(array: npt.NDArray[Any] | None) -> Tensor | None: ...
def _tensor(array: npt.NDArray[Any] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


def _joined_or_none(arrays: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "all sequences of a step are estimated, or none"
    joined: npt.NDArray[Any] = np.concatenate(known)
    return joined
