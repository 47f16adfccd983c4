"""The table of token fields: every array with an entry for each token, from trajectories to a GPU.

A training sequence holds the fields as numpy arrays, a micro batch holds them as tensors. All code
in between uses the table: reading trajectories, padding, filler, joining, cutting for shared
prefixes and for context parallel ranks, and copies to a device. A new field is one line of
`TokenFields`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
from slipstream.core.staleness import lag
from slipstream.core.types import Trajectory

Array = TypeVar("Array")
NumpyArray = npt.NDArray[Any]
# (trajectories, step that trains them) -> the values of all trajectories, joined in order; None if
# the trajectories lack the field.
Read = Callable[[Sequence[Trajectory], int], NumpyArray | None]


@dataclass(frozen=True)
class Column:
    """The element type of a token field, and how its array is read from trajectories and padded."""

    # The type in a training sequence.
    dtype: type[np.generic]
    # None for a field that other code computes: an estimate, or experts.
    read: Read | None = None
    # Whether the field has a value for every token of a trajectory, or only for sampled tokens.
    of_all_tokens: bool = False
    # Whether a value is stored at the position that predicts its token, or at the token itself.
    at_prediction: bool = True
    # Whether the largest value of the type means "not known". It then pads the array, and stands
    # for sequences that lack the field. Other fields are padded with 0, and either all sequences of
    # a step have them or none.
    has_unknown: bool = False

    def filled(self, length: int, like: NumpyArray) -> NumpyArray:
        """Returns padding for `length` tokens, with the type and trailing dimensions of `like`."""
        value = np.iinfo(like.dtype).max if self.has_unknown else 0
        return np.full((length, *like.shape[1:]), value, dtype=like.dtype)

    def joined(self, arrays: Sequence[NumpyArray | None], lengths: Sequence[int]) -> NumpyArray:
        """Joins the arrays of sequences with these `lengths`; pads where an array is None.

        At least one sequence must have an array; all must have one unless `has_unknown` is set.
        """
        like = next(array for array in arrays if array is not None)
        assert self.has_unknown or all(array is not None for array in arrays), (
            "all sequences of a step have a field, or none"
        )
        return np.concatenate(
            [
                self.filled(length, like) if array is None else array
                for array, length in zip(arrays, lengths, strict=True)
            ]
        )


def token_lags(trajectories: Sequence[Trajectory], step: int) -> npt.NDArray[np.int32]:
    """Returns the lag of each sampled token, one array over all trajectories in order."""
    spans = [span for trajectory in trajectories for span in trajectory.version_spans]
    return np.repeat(
        np.array([lag(step, span.version.step) for span in spans], dtype=np.int32),
        np.array([span.length for span in spans], dtype=np.int64),
    )


def _column(*arguments: Any, **named: Any) -> Mapping[str, Column]:  # noqa: ANN401 - of `Column`
    return {"column": Column(*arguments, **named)}


def _joined(name: str) -> Read:
    """Returns a function that joins field `name` of trajectories.

    The function returns None if a trajectory lacks the field.
    """

    def read(trajectories: Sequence[Trajectory], _: int) -> NumpyArray | None:
        arrays = [getattr(trajectory, name) for trajectory in trajectories]
        return None if any(array is None for array in arrays) else np.concatenate(arrays)

    return read


def _loss_mask(trajectories: Sequence[Trajectory], _: int) -> NumpyArray:
    return np.ones(sum(t.num_sampled_tokens for t in trajectories), dtype=np.bool_)


def _behavior_logprobs(trajectories: Sequence[Trajectory], _: int) -> NumpyArray:
    return np.concatenate(
        [
            np.full_like(t.behavior_logprobs, np.nan) if t.is_given else t.behavior_logprobs
            for t in trajectories
        ]
    )


@dataclass(frozen=True)
class TokenEstimates(Generic[Array]):
    """Values of sampled tokens that are computed from the rewards, a reference model and a critic.

    Values are None if the run lacks the model. Arrays are [sampled tokens] of one trajectory.
    """

    advantages: Array = field(metadata=_column(np.float32))
    # Natural logarithm, at the sampling temperature.
    reference_logprobs: Array | None = field(default=None, metadata=_column(np.float32))
    # The critic's estimate before each token was sampled, and its target.
    values: Array | None = field(default=None, metadata=_column(np.float32))
    returns: Array | None = field(default=None, metadata=_column(np.float32))
    # [sampled tokens, top k]: the reference's most likely tokens, and their log-probabilities. Both
    # are None unless the loss reads them.
    top_ids: Array | None = field(default=None, metadata=_column(np.int64))
    top_logprobs: Array | None = field(default=None, metadata=_column(np.float32))


@dataclass(frozen=True, kw_only=True)
class TokenFields(TokenEstimates[Array]):
    """All fields of the tokens of a sequence or of a micro batch, [tokens, ...] each."""

    token_ids: Array = field(
        metadata=_column(np.int64, _joined("token_ids"), of_all_tokens=True, at_prediction=False)
    )
    # The token that each position predicts; 0 at the end of a sequence.
    targets: Array = field(metadata=_column(np.int64, _joined("token_ids"), of_all_tokens=True))
    loss_mask: Array = field(metadata=_column(np.bool_, _loss_mask))
    # NaN for a token that no policy sampled: an environment gave it.
    behavior_logprobs: Array = field(metadata=_column(np.float32, _behavior_logprobs))
    lags: Array = field(metadata=_column(np.int32, token_lags))
    # [tokens, layers, experts per token]: the experts of the token itself, not of the token that it
    # predicts. None if no experts are known.
    expert_ids: Array | None = field(
        default=None, metadata=_column(np.unsignedinteger, has_unknown=True)
    )

    def map_fields(self, change: Callable[[Array, Column], Array]) -> Self:
        """Returns a copy with `change(array, column)` in place of every array that is not None."""
        known = ((name, column, getattr(self, name)) for name, column in TOKEN_FIELDS.items())
        changed = {
            name: change(array, column) for name, column, array in known if array is not None
        }
        return dataclasses.replace(self, **changed)


TOKEN_FIELDS: Mapping[str, Column] = {
    each.name: each.metadata["column"] for each in dataclasses.fields(TokenFields)
}
