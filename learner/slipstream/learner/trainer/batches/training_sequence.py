"""Sequences to train: the tokens of a trajectory with all their fields. Pure functions.

Position i of a sequence predicts token i + 1 of the same sequence. Loss mask, advantages, behavior
log-probabilities and lags of a token are stored at the position that predicts the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from slipstream.core.models.vision.pixels import ImageProcessor
from slipstream.core.types import TokenArray, Trajectory
from slipstream.learner.trainer.batches.images import SequenceImage, images_of
from slipstream.learner.trainer.batches.token_fields import (
    TOKEN_FIELDS,
    NumpyArray,
    TokenEstimates,
    TokenFields,
)


@dataclass(frozen=True, kw_only=True)
class TrainingSequence(TokenFields[NumpyArray]):
    """A sequence to train, with its token fields; the last position predicts nothing."""

    # Weight of the sequence's tokens in the loss.
    loss_weight: float = 1.0
    # Index in `EnvironmentAlgorithms.distinct` of the algorithm that trains the sequence.
    algorithm: int = 0
    images: tuple[SequenceImage, ...] = ()

    @classmethod
    def of_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        estimates: Sequence[TokenEstimates[NumpyArray]] | None = None,
        *,
        step: int,
        processor: ImageProcessor | None = None,
        with_experts: bool = False,
    ) -> list[TrainingSequence]:
        """Makes sequences that train all sampled tokens but the first token of a sequence.

        A trajectory gives one sequence, or one for each of its branches. `estimates` has an entry
        for each trajectory; if it is None, all advantages are 0. `step` is the version before the
        training, from which lags are counted. `processor` computes the pixels of images, if the
        model takes any. `with_experts` adds the recorded experts. The sequences are views of arrays
        for the whole batch: many small arrays would cost more time than the training of short
        sequences. Raises UntrainableBatch for a faulty image.
        """
        if not trajectories:
            return []
        if estimates is None:
            estimates = [TokenEstimates(np.zeros(t.num_sampled_tokens)) for t in trajectories]
        parts = [(t, part.tokens) for t in trajectories for part in t.sequences()]
        ends = np.cumsum([tokens.stop - tokens.start for _, tokens in parts])
        sampled = np.concatenate([t.sampled_mask() for t in trajectories])
        lengths = [t.num_sampled_tokens for t in trajectories]
        fields: dict[str, list[Any]] = {}
        for name, column in TOKEN_FIELDS.items():
            if column.read is not None:
                values = column.read(trajectories, step)
            else:
                known = [getattr(one, name, None) for one in estimates]
                values = None if known[0] is None else column.joined(known, lengths)
            if values is None:
                continue
            if column.of_all_tokens:
                whole = values.astype(column.dtype)
            else:
                whole = np.zeros((len(sampled), *values.shape[1:]), dtype=column.dtype)
                whole[sampled] = values
            if column.at_prediction:
                # The value of token i + 1 stands at i, and 0 at the last position of a sequence.
                whole = np.roll(whole, -1, axis=0)
                whole[ends - 1] = 0
            fields[name] = np.split(whole, ends[:-1])
        if with_experts:
            fields["expert_ids"] = [
                None if t.routed_experts is None else t.routed_experts.expert_ids[tokens]
                for t, tokens in parts
            ]
        if processor is not None:
            fields["images"] = [images_of(t, tokens, processor) for t, tokens in parts]
        rows = zip(*fields.values(), strict=True)
        return [cls(**dict(zip(fields, row, strict=True))) for row in rows]

    @classmethod
    def of_tokens(cls, token_ids: TokenArray) -> TrainingSequence:
        """Makes a sequence that trains all predictions; behavior log-probabilities are 0."""
        length = len(token_ids)
        return cls(
            token_ids=token_ids.astype(np.int64),
            targets=np.append(token_ids[1:], 0).astype(np.int64)[:length],
            loss_mask=np.arange(length) < length - 1,
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            lags=np.zeros(length, dtype=np.int32),
            advantages=np.zeros(length, dtype=np.float32),
        )

    def __len__(self) -> int:
        return len(self.token_ids)
