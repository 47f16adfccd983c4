"""Packing of sequences of uneven length into micro batches of bounded size: pure functions.

A micro batch is one row of tokens, with its sequences one after the other. Targets stand, like all
else that is known of a token, at the position that predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from slipstream.learner.trainer.batches.images import ImageInputs
from slipstream.learner.trainer.batches.micro_batch import MicroBatch
from slipstream.learner.trainer.batches.token_fields import TOKEN_FIELDS
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence, predicted


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
    filler has padding for each field that they have.
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
    ids = np.repeat(np.array([part.algorithm for part in parts]), lengths)
    first = np.repeat(ends - lengths - np.asarray(starts), lengths)
    images = [part.images for part in parts]
    fields: dict[str, Any] = {}
    for name, column in TOKEN_FIELDS.items():
        arrays = [getattr(part, name) for part in parts]
        if any(array is not None for array in arrays):
            whole = column.joined(arrays, lengths.tolist())
            # torch supports hardly any operation on unsigned integers of two bytes.
            fields[name] = torch.from_numpy(
                whole.astype(np.int32) if whole.dtype == np.uint16 else whole
            )
    return MicroBatch(
        **fields,
        position_ids=torch.from_numpy(np.arange(ends[-1]) - first),
        targets=torch.from_numpy(targets),
        loss_weights=torch.from_numpy(np.repeat(weights, lengths)),
        sequence_ids=torch.from_numpy(np.repeat(np.asarray(places), lengths)),
        cu_seqlens=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        max_seqlen=int(lengths.max()),
        indices=tuple(indices),
        algorithm_ids=torch.from_numpy(ids) if ids.any() else None,
        images=ImageInputs.of(images, lengths.tolist()) if any(images) else None,
    )


def filler_to(
    multiple: int, num_tokens: int, sequences: Sequence[TrainingSequence]
) -> list[TrainingSequence]:
    """Returns the filler that completes `num_tokens` to a multiple, at least one token; or none.

    It has no loss, and the padding of each field that `sequences` have.
    """
    missing = round_up(max(1, num_tokens), multiple) - num_tokens
    if not missing:
        return []
    like = sequences[0] if sequences else TrainingSequence.of_tokens(np.zeros(0, dtype=np.uint32))
    fields: dict[str, Any] = {
        name: column.filled(missing, array)
        for name, column in TOKEN_FIELDS.items()
        if (array := getattr(like, name)) is not None
    }
    return [TrainingSequence(**fields)]


def round_up(number: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def _padded(sequence: TrainingSequence, multiple: int) -> TrainingSequence:
    missing = -len(sequence) % multiple
    if not missing:
        return sequence
    return sequence.map_fields(
        lambda array, column: np.concatenate([array, column.filled(missing, array)])
    )
