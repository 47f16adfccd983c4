"""From sequences of uneven length to micro batches of bounded size: pure functions.

A micro batch is one row of tokens, its sequences one after the other. Position i of a sequence
predicts token i + 1 of the same sequence: targets, loss mask, advantages, behavior
log-probabilities and lags stand where the prediction is made.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from slipstream.learner.trainer.batch import token_lags
from slipstream.protocol.types import TokenArray, Trajectory
from torch import Tensor

Item = TypeVar("Item", bound=np.generic)
FloatArray = npt.NDArray[np.float32]
_NOTHING: FloatArray = np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class TokenEstimates:
    """What is known of the sampled tokens of one trajectory, float32 [sampled tokens] each.

    The advantages come from the rewards, the others from models that the run may not have.
    """

    advantages: FloatArray
    # Natural logarithm, at the sampling temperature.
    reference_logprobs: FloatArray | None = None
    # The critic's estimate before each token was sampled, and what it should have been.
    values: FloatArray | None = None
    returns: FloatArray | None = None

    def map(self, change: Callable[[FloatArray], FloatArray]) -> TokenEstimates:
        """The same with every array that there is changed."""
        reference, values, returns = (
            None if known is None else change(known)
            for known in (self.reference_logprobs, self.values, self.returns)
        )
        return TokenEstimates(change(self.advantages), reference, values, returns)


@dataclass(frozen=True)
class TrainingSequence:
    """One sequence, its arrays as long as itself; the last position predicts nothing."""

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    behavior_logprobs: npt.NDArray[np.float32]
    lags: npt.NDArray[np.int32]
    estimates: TokenEstimates
    # What its tokens count in the loss, beside those of other sequences.
    loss_weight: float = 1.0

    @classmethod
    def of_trajectory(
        cls, trajectory: Trajectory, estimates: TokenEstimates, *, step: int
    ) -> TrainingSequence:
        """Trains the sampled tokens. One at the very beginning is left out: nothing predicts it."""
        sampled = trajectory.sampled_mask()

        def placed(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
            whole = np.zeros(len(sampled), dtype=values.dtype)
            whole[sampled] = values
            return _predicted(whole)

        return cls(
            token_ids=trajectory.token_ids.astype(np.int64),
            loss_mask=_predicted(sampled),
            behavior_logprobs=placed(trajectory.behavior_logprobs),
            lags=placed(token_lags(trajectory, step)),
            estimates=estimates.map(placed),
        )

    @classmethod
    def of_tokens(cls, token_ids: TokenArray) -> TrainingSequence:
        """All tokens but the first are of interest, none has a behavior policy."""
        length = len(token_ids)
        return cls(
            token_ids=token_ids.astype(np.int64),
            loss_mask=_predicted(np.ones(length, dtype=np.bool_)),
            behavior_logprobs=np.zeros(length, dtype=np.float32),
            lags=np.zeros(length, dtype=np.int32),
            estimates=TokenEstimates(np.zeros(length, dtype=np.float32)),
        )

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences, all tensors of shape [tokens] but `cu_seqlens`."""

    token_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    loss_mask: Tensor
    # What each token counts in the loss; the sum is divided by the trained tokens of all ranks.
    loss_weights: Tensor
    advantages: Tensor
    behavior_logprobs: Tensor
    lags: Tensor
    # int64: the place in `indices` of each token's sequence; filler has `len(indices)`.
    sequence_ids: Tensor
    # int32, where each sequence begins, and the end; filler is a last sequence without loss.
    cu_seqlens: Tensor
    max_seqlen: int
    # Which sequences these are, in order, filler left out.
    indices: tuple[int, ...]
    # None without a reference model.
    reference_logprobs: Tensor | None = None
    # Both None without a critic.
    values: Tensor | None = None
    returns: Tensor | None = None

    def map_tokens(self, change: Callable[[Tensor], Tensor]) -> MicroBatch:
        """The same with every [tokens] tensor that there is changed."""
        tensors: dict[str, Any] = {
            name: change(value)
            for name, value in vars(self).items()
            if isinstance(value, Tensor) and name != "cu_seqlens"
        }
        return dataclasses.replace(self, **tensors)

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return dataclasses.replace(self.map_tokens(moved), cu_seqlens=moved(self.cu_seqlens))


def build_micro_batch(
    sequences: Sequence[TrainingSequence],
    indices: Sequence[int],
    *,
    multiple: int = 1,
    sequence_multiple: int = 1,
) -> MicroBatch:
    """Packs `sequences[i]` for i in `indices`, and filler up to a multiple of `multiple`.

    Each is padded at its end to a multiple of `sequence_multiple`, which must divide `multiple`;
    what comes last in a sequence disturbs nobody before it, and has no loss.
    There is filler for no sequence at all, too: a micro batch is never empty. `sequences` are all
    of the step's, and what is estimated of them is estimated of filler too: as 0.
    """
    chosen = [_padded(sequences[index], sequence_multiple) for index in indices]
    total = sum(len(sequence) for sequence in chosen)
    filler = round_up(max(1, total), multiple) - total
    if filler:
        like = sequences[0].estimates if sequences else TokenEstimates(_NOTHING)
        chosen.append(_filler(filler, like))
    lengths = [len(sequence) for sequence in chosen]
    token_ids = [sequence.token_ids for sequence in chosen]
    return MicroBatch(
        token_ids=_joined(token_ids),
        position_ids=_joined([np.arange(length, dtype=np.int64) for length in lengths]),
        targets=_joined([_predicted(ids) for ids in token_ids]),
        loss_mask=_joined([sequence.loss_mask for sequence in chosen]),
        loss_weights=_joined(
            [np.full(len(sequence), sequence.loss_weight, dtype=np.float32) for sequence in chosen]
        ),
        advantages=_joined([sequence.estimates.advantages for sequence in chosen]),
        behavior_logprobs=_joined([sequence.behavior_logprobs for sequence in chosen]),
        lags=_joined([sequence.lags for sequence in chosen]),
        sequence_ids=_joined(
            [np.full(length, place, dtype=np.int64) for place, length in enumerate(lengths)]
        ),
        cu_seqlens=torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        indices=tuple(indices),
        reference_logprobs=_joined_or_none([s.estimates.reference_logprobs for s in chosen]),
        values=_joined_or_none([s.estimates.values for s in chosen]),
        returns=_joined_or_none([s.estimates.returns for s in chosen]),
    )


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _predicted(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
    """Moves what belongs to token i + 1 to position i; the last position gets 0."""
    moved = np.zeros_like(values)
    moved[:-1] = values[1:]
    return moved


def _padded(sequence: TrainingSequence, multiple: int) -> TrainingSequence:
    missing = -len(sequence) % multiple
    if not missing:
        return sequence

    def pad(values: npt.NDArray[Item]) -> npt.NDArray[Item]:
        return np.pad(values, (0, missing))

    return dataclasses.replace(
        sequence,
        token_ids=pad(sequence.token_ids),
        loss_mask=pad(sequence.loss_mask),
        behavior_logprobs=pad(sequence.behavior_logprobs),
        lags=pad(sequence.lags),
        estimates=sequence.estimates.map(pad),
    )


def _filler(length: int, like: TokenEstimates) -> TrainingSequence:
    """A sequence without loss, with zeros for whatever `like` has."""
    nothing = TrainingSequence.of_tokens(np.zeros(length, dtype=np.uint32))
    return dataclasses.replace(
        nothing,
        loss_mask=np.zeros(length, dtype=np.bool_),
        estimates=like.map(lambda _: np.zeros(length, dtype=np.float32)),
    )


def _joined(arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _joined_or_none(arrays: Sequence[FloatArray | None]) -> Tensor | None:
    known = [array for array in arrays if array is not None]
    if not known:
        return None
    assert len(known) == len(arrays), "all sequences of a step are estimated, or none"
    return _joined(known)
