"""Sequences to train: the tokens of a trajectory with what is known of each: pure functions.

Position i of a sequence predicts token i + 1 of the same sequence: loss mask, advantages, behavior
log-probabilities and lags are stored at the position of the prediction.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from slipstream.core.models.vision.pixels import ImageProcessor
from slipstream.core.routed_experts import ExpertArray
from slipstream.core.types import TokenArray, Trajectory
from slipstream.learner.trainer.batches.batch import token_lags
from slipstream.learner.trainer.batches.images import PlacedImage, images_of

Item = TypeVar("Item", bound=np.generic)
FloatArray = npt.NDArray[np.float32]


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
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

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
            joined = joined_or_none(arrays)
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
            return parts_of(predicted(whole, ends), ends)

        found = [
            cls(*arrays)
            for arrays in zip(
                parts_of(token_ids, ends),
                parts_of(predicted(sampled, ends), ends),
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


def _behavior(trajectory: Trajectory) -> npt.NDArray[np.float32]:
    logprobs = trajectory.behavior_logprobs
    return np.full_like(logprobs, np.nan) if trajectory.is_given else logprobs


def predicted(values: npt.NDArray[Item], ends: npt.NDArray[np.int64]) -> npt.NDArray[Item]:
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


def joined_or_none(arrays: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    """Joins arrays of all sequences of a step; None if the step lacks this estimate."""
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "all sequences of a step are estimated, or none"
    joined: npt.NDArray[Any] = np.concatenate(known)
    return joined
