"""Sequences to train and micro batches of them: tokens with all their fields and images.

Every array with an entry for each token is one line of `TokenFields`. A training sequence holds the
fields as numpy arrays, a micro batch holds them as tensors. All code in between uses this table:
reading trajectories, padding, filler, joining, cutting for shared prefixes and for context parallel
ranks, and copies to a device.

Position i of a sequence predicts token i + 1 of the same sequence. Loss mask, advantages, behavior
log-probabilities and lags of a token are stored at the position that predicts the token.

Context parallel ranks split a micro batch. Every sequence is cut into 2 * size chunks of equal
length. Rank r holds chunks r and 2 * size - 1 - r of each sequence, so that all ranks have about
equal work under a causal mask. Megatron's rotary embedding and TransformerEngine's attention expect
this order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from slipstream.core.kept_tokens import KeptTokens
from slipstream.core.models.images import ImageProcessor
from slipstream.core.types import TokenArray, Trajectory
from slipstream.learner.trainer.batches.sequence_images import (
    ImageInputs,
    SequenceImage,
    images_of,
)
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Array = TypeVar("Array")
Record = TypeVar("Record", bound="DataclassInstance")
NumpyArray = npt.NDArray[Any]
# (trajectories, step that trains them) -> the values of all trajectories, joined in order; None if
# the trajectories lack the field.
Read = Callable[[Sequence[Trajectory], int], NumpyArray | None]


@dataclass(frozen=True)
class SequenceColumn:
    """The element type of a token field, and how its array is read from trajectories and padded."""

    # The type in a training sequence.
    dtype: type[np.generic]
    # The reader, or None for a field that other code computes: an estimate, or experts.
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
        """Joins arrays of sequences of these `lengths`; pads a missing one, if `has_unknown`."""
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
        np.array([step - span.version.step for span in spans], dtype=np.int32),
        np.array([span.length for span in spans], dtype=np.int64),
    )


def _column(*arguments: Any, **keywords: Any) -> Mapping[str, SequenceColumn]:  # noqa: ANN401 - of `SequenceColumn`
    return {"column": SequenceColumn(*arguments, **keywords)}


def _joined(name: str) -> Read:
    """Returns a function that joins field `name`, or returns None if a trajectory lacks it."""

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
    # The learner's with the weights that sampled the token, where those are older ones.
    version_logprobs: Array | None = field(default=None, metadata=_column(np.float32))
    # The critic's estimate before each token was sampled, and its target.
    values: Array | None = field(default=None, metadata=_column(np.float32))
    returns: Array | None = field(default=None, metadata=_column(np.float32))
    # [sampled tokens, top k]: the reference's most likely tokens, and their log-probabilities. Both
    # are None unless the loss reads them.
    top_ids: Array | None = field(default=None, metadata=_column(np.int64))
    top_logprobs: Array | None = field(default=None, metadata=_column(np.float32))
    # The factor of the divergence from the reference in the loss; None: that of the whole batch.
    kl_coefficients: Array | None = field(default=None, metadata=_column(np.float32))
    # The place of the token's loss among those of the step; None: all tokens have one loss.
    objectives: Array | None = field(default=None, metadata=_column(np.int16))
    # The place of the token's teacher among those with a name, or -1; None: none has a name.
    teachers: Array | None = field(
        default=None,
        metadata=_column(np.int16),
    )
    # The temperature at which the token was sampled; None: that of the whole batch.
    temperatures: Array | None = field(default=None, metadata=_column(np.float64))
    # Whether the token belongs to the ratio of its sequence, in passes that a client orders.
    ratio_mask: Array | None = field(default=None, metadata=_column(np.bool_))


@dataclass(frozen=True, kw_only=True)
class TokenFields(TokenEstimates[Array]):
    """All fields of the tokens of a sequence or of a micro batch, [tokens, ...] each."""

    token_ids: Array = field(
        metadata=_column(
            np.int64,
            _joined("token_ids"),
            of_all_tokens=True,
            at_prediction=False,
        )
    )
    # The token that each position predicts; 0 at the end of a sequence.
    targets: Array = field(metadata=_column(np.int64, _joined("token_ids"), of_all_tokens=True))
    loss_mask: Array = field(metadata=_column(np.bool_, _loss_mask))
    # NaN for a token that no policy sampled: an environment gave it.
    behavior_logprobs: Array = field(metadata=_column(np.float32, _behavior_logprobs))
    lags: Array = field(metadata=_column(np.int32, token_lags))
    # [tokens, largest set]: ids plus 1 of the tokens that the target was drawn from, then zeros. A
    # row of zeros stands for all tokens. None if no token of the step has such a set, and in a
    # training sequence, whose `kept_sets` take a fraction of the memory.
    kept_ids: Array | None = field(default=None, metadata=_column(np.int32))
    # [tokens, layers, experts per token]: the experts of the token itself, not of the token that it
    # predicts. None if no experts are known.
    expert_ids: Array | None = field(
        default=None, metadata=_column(np.unsignedinteger, has_unknown=True)
    )

    def map_fields(self, change: Callable[[Array, SequenceColumn], Array]) -> Self:
        """Returns a copy with `change(array, column)` in place of every array that is not None."""
        fields = ((name, column, getattr(self, name)) for name, column in TOKEN_FIELDS.items())
        changed = {
            name: change(array, column) for name, column, array in fields if array is not None
        }
        return dataclasses.replace(self, **changed)


TOKEN_FIELDS: Mapping[str, SequenceColumn] = {
    field_.name: field_.metadata["column"] for field_ in dataclasses.fields(TokenFields)
}


def _at_temperature(
    estimate: TokenEstimates[NumpyArray], trajectory: Trajectory, temperature: float
) -> TokenEstimates[NumpyArray]:
    temperatures = np.full(trajectory.num_sampled_tokens, temperature)
    return dataclasses.replace(estimate, temperatures=temperatures)


def _at_positions(
    values: NumpyArray, column: SequenceColumn, is_sampled: NumpyArray, ends: NumpyArray
) -> NumpyArray:
    """Returns a column's values, of sampled tokens or of all, at all positions of the batch.

    `is_sampled` [tokens] marks the sampled ones, `ends` are the ends of the sequences.
    """
    if column.of_all_tokens:
        all_values = values.astype(column.dtype)
    else:
        all_values = np.zeros((len(is_sampled), *values.shape[1:]), dtype=column.dtype)
        all_values[is_sampled] = values
    if column.at_prediction:
        # The value of token i + 1 stands at i, and 0 at the last position of a sequence.
        all_values = np.roll(all_values, -1, axis=0)
        all_values[ends - 1] = 0
    return all_values


def _column_values(
    name: str,
    trajectories: Sequence[Trajectory],
    estimates: Sequence[TokenEstimates[NumpyArray]],
    step: int,
) -> NumpyArray | None:
    """Returns the values of token field `name`, joined in order, or None if the step lacks it."""
    column = TOKEN_FIELDS[name]
    if column.read is not None:
        return column.read(trajectories, step)
    arrays = [getattr(estimate, name, None) for estimate in estimates]
    if arrays[0] is None:
        return None
    return column.joined(arrays, [t.num_sampled_tokens for t in trajectories])


@dataclass(frozen=True)
class KeptSets:
    """The kept tokens of a sequence, packed until a micro batch needs them."""

    trajectory: Trajectory
    # The sequence's tokens in the trajectory.
    tokens: slice

    def table(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """Returns the rows of `kept_ids` of positions `start` to `end`, as wide as they need."""
        trajectory = self.trajectory
        is_sampled = trajectory.sampled_mask()
        # The last position predicts nothing.
        first = self.tokens.start + start + 1
        last = min(self.tokens.start + end + 1, self.tokens.stop)
        has_set = is_sampled[first:last]
        first_sampled = int(np.count_nonzero(is_sampled[:first]))
        num_sets = int(np.count_nonzero(has_set))
        sets = KeptTokens.unpacked(trajectory.kept_tokens, trajectory.num_sampled_tokens)
        own_sets = sets.cut(first_sampled, first_sampled + num_sets)
        rows = np.zeros((end - start, own_sets.width), dtype=np.int32)
        rows[: last - first][has_set] = own_sets.table(own_sets.width)
        return rows


@dataclass(frozen=True, kw_only=True)
class TrainingSequence(TokenFields[NumpyArray]):
    """A sequence to train, with its token fields; the last position predicts nothing."""

    # Weight of the sequence's tokens in the loss.
    loss_weight: float = 1.0
    # None if no token of the step has a set of kept tokens.
    kept_sets: KeptSets | None = None
    images: tuple[SequenceImage, ...] = ()

    @classmethod
    def of_trajectories(
        cls,
        trajectories: Sequence[Trajectory],
        estimates: Sequence[TokenEstimates[NumpyArray]] | None = None,
        *,
        step: int,
        temperatures: Sequence[float] | None = None,
        processor: ImageProcessor | None = None,
        with_experts: bool = False,
    ) -> list[TrainingSequence]:
        """Makes sequences that train all sampled tokens but the first token of a sequence.

        A trajectory gives one sequence, or one for each of its branches. `estimates` has an entry
        for each trajectory; if it is None, all advantages are 0. `step` is the version before the
        training, from which lags are counted. `temperatures` has that of each trajectory, unless
        all have the temperature of the batch. `processor` computes the pixels of images, if the
        model takes any. `with_experts` adds the recorded experts. The sequences are views of arrays
        for the whole batch: many small arrays would cost more time than the training of short
        sequences. Kept tokens stay packed in their trajectories. Raises UntrainableBatch for a
        faulty image.
        """
        if not trajectories:
            return []
        if estimates is None:
            estimates = [TokenEstimates(np.zeros(t.num_sampled_tokens)) for t in trajectories]
        if temperatures is not None:
            estimates = list(map(_at_temperature, estimates, trajectories, temperatures))
        parts = [(t, part.tokens) for t in trajectories for part in t.sequences]
        ends = np.cumsum([tokens.stop - tokens.start for _, tokens in parts])
        is_sampled = np.concatenate([t.sampled_mask() for t in trajectories])
        fields: dict[str, list[Any]] = {}
        for name, column in TOKEN_FIELDS.items():
            values = _column_values(name, trajectories, estimates, step)
            if values is not None:
                values = _at_positions(values, column, is_sampled, ends)
                fields[name] = np.split(values, ends[:-1])
        if with_experts:
            fields["expert_ids"] = [
                None if t.routed_experts is None else t.routed_experts.expert_ids[tokens]
                for t, tokens in parts
            ]
        if any(trajectory.kept_tokens for trajectory in trajectories):
            fields["kept_sets"] = [KeptSets(t, tokens) for t, tokens in parts]
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


@dataclass(frozen=True, kw_only=True)
class MicroBatch(TokenFields[Tensor]):
    """Packed sequences; tensors are [tokens] unless a comment says otherwise."""

    position_ids: Tensor
    # Weight of each token in the loss; the sum is divided by the trained tokens of all ranks.
    loss_weights: Tensor
    # int64: for each token the place of its sequence in `indices`; filler has `len(indices)`.
    sequence_ids: Tensor
    # bool: whether a token is padding of a sequence, or filler.
    is_padding: Tensor
    # int32: the start of each sequence, and the end of the last; filler is a last sequence without
    # loss.
    cu_seqlens: Tensor
    max_seqlen: int
    # Indices of the sequences, in order, without filler.
    indices: tuple[int, ...]
    # Keys of tree attention; None if each sequence attends to its own tokens.
    paths: Paths | None = None
    # The images, or None if no sequence has any.
    images: ImageInputs | None = None

    @property
    def all_targets(self) -> Tensor:
        """The tokens that the loss reads, [tokens], or [tokens, 1 + top k] with `top_ids`."""
        if self.top_ids is None:
            return self.targets
        return torch.cat([self.targets[:, None], self.top_ids], dim=1)

    def to(self, device: torch.device) -> MicroBatch:
        """Returns a copy on `device`, or itself for a CPU, without waiting for the device."""
        if device.type == "cpu":
            return self
        return dataclasses.replace(
            with_tensors(self, lambda tensor: to_device(tensor, device)),
            paths=self.paths and self.paths.to(device),
            images=self.images and self.images.to(device),
        )


@dataclass(frozen=True)
class Paths:
    """The keys for tree attention: a segment attends to all tokens on its path from the root.

    In a micro batch with `Paths`, `cu_seqlens` bounds segments instead of sequences. A segment's
    own tokens are the last of its keys.
    """

    # int64 [keys]: the index in the micro batch of each key, segment by segment.
    key_places: Tensor
    # int32: the start of each segment's keys, and the end of the last.
    cu_seqlens: Tensor
    max_seqlen: int
    # The copies of token t among the keys are `copies[copy_bounds[t] : copy_bounds[t + 1]]`.
    copies: Tensor
    copy_bounds: Tensor

    @classmethod
    def of(cls, places: Sequence[npt.NDArray[np.int64]], num_tokens: int) -> Paths:
        """Returns the keys of a micro batch; `places` has the indices of each segment's keys."""
        lengths = [len(keys) for keys in places]
        joined = np.concatenate(places)
        counts = np.bincount(joined, minlength=num_tokens)
        return cls(
            key_places=torch.from_numpy(joined),
            cu_seqlens=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)),
            max_seqlen=max(lengths),
            copies=torch.from_numpy(joined.argsort(kind="stable")),
            copy_bounds=torch.from_numpy(np.cumsum([0, *counts])),
        )

    def to(self, device: torch.device) -> Paths:
        """Returns a copy on `device`, without waiting for the device."""
        return with_tensors(self, lambda tensor: to_device(tensor, device))


def with_tensors(record: Record, change: Callable[[Tensor], Tensor], *, but: str = "") -> Record:
    """Returns a copy of a dataclass with `change` applied to each tensor field, except `but`."""
    tensors: dict[str, Any] = {
        name: change(value)
        for name, value in vars(record).items()
        if isinstance(value, Tensor) and name != but
    }
    return dataclasses.replace(record, **tensors)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a copy on `device`, or `tensor` itself for a CPU, without a wait for earlier work."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def zigzag(bounds: Sequence[int], rank: int, size: int) -> Tensor:
    """Returns the indices of the tokens that context parallel rank `rank` of `size` holds, int64.

    The indices refer to the whole micro batch, in the order in which the rank holds the tokens.
    `bounds` has the start of each sequence, and the end of the last. With more than one rank every
    length must be a multiple of 2 * size, and each rank holds 1 / size of a sequence.
    """
    if size == 1:
        return torch.arange(bounds[-1])
    parts = []
    for start, end in itertools.pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * size)
        assert rest == 0, f"a sequence of {end - start} tokens cannot be cut for cp {size}"
        starts = (start + place * chunk for place in (rank, 2 * size - 1 - rank))
        parts += [torch.arange(first, first + chunk) for first in starts]
    return torch.cat(parts)


@functools.lru_cache(maxsize=16)
def gathered_places(bounds: tuple[int, ...], size: int) -> Tensor:
    """Returns the index of each token of a micro batch in the concatenated shares of all ranks."""
    return torch.cat([zigzag(bounds, rank, size) for rank in range(size)]).argsort()


def share_of_rank(micro_batch: MicroBatch, rank: int, size: int) -> MicroBatch:
    """Returns a rank's share; `cu_seqlens` and `max_seqlen` still describe whole sequences."""
    if size == 1:
        return micro_batch
    places = zigzag(micro_batch.cu_seqlens.tolist(), rank, size)
    # The first dim of all other tensors is tokens.
    return with_tensors(micro_batch, lambda tensor: tensor[places], but="cu_seqlens")


@dataclass(frozen=True)
class Segment:
    """Positions `start` to `end` of sequence `index`, which other sequences may share.

    `parent` is the index, in the bundle, of the previous segment on the path, or None at the
    beginning of a sequence. Only the sequence `index` trains any of these positions.
    """

    index: int
    start: int
    end: int
    parent: int | None = None

    def __len__(self) -> int:
        return self.end - self.start


# Segments of one bundle; a parent comes before its children, so that the segments of each sequence
# are in order.
Bundle = list[Segment]


def kept_ids_of(
    sequences: Sequence[TrainingSequence],
    segments: Sequence[Segment],
    lengths: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    """Returns the field `kept_ids` of a micro batch; `lengths` are those of padded segments."""
    tables = []
    for segment, length in zip(segments, lengths, strict=True):
        table = np.zeros((length, 0), dtype=np.int32)
        # Filler has no sequence.
        if len(segment):
            kept_sets = sequences[segment.index].kept_sets
            assert kept_sets is not None, "all sequences of a step have a field, or none"
            table = kept_sets.table(segment.start, segment.end)
        tables.append(table)
    width = max(table.shape[1] for table in tables)
    padded = [
        np.pad(table, ((0, length - len(table)), (0, width - table.shape[1])))
        for table, length in zip(tables, lengths, strict=True)
    ]
    return np.concatenate(padded)
