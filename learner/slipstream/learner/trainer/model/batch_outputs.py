"""Outputs of a model for all sampled tokens of a batch, on every rank."""

from collections.abc import Sequence

import numpy as np
from slipstream.core.types import LogprobArray
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.model.model import ParallelModel
from slipstream.learner.trainer.model.schedule import Forward, masked_outputs


def batch_outputs(
    model: ParallelModel,
    batch: Batch,
    forward: Forward,
    *,
    width: int = 0,
    temperatures: Sequence[float] | None = None,
) -> list[LogprobArray]:
    """Returns for each trajectory the outputs that predict its sampled tokens; on every rank.

    Each array is float32 [sampled tokens], or [sampled tokens, width] with a `width`. The output is
    0 for a sampled token that is the first of its sequence, which nothing predicts. `temperatures`
    is as in `TrainingSequence.of_trajectories`. Collective, as `masked_outputs` says.
    """
    sequences = TrainingSequence.of_trajectories(
        batch.trajectories,
        step=batch.step,
        temperatures=temperatures,
        processor=None if model.vision is None else model.vision.processor,
    )
    return by_trajectory(batch, masked_outputs(model, sequences, forward, width=width))


def by_trajectory(batch: Batch, outputs: Sequence[LogprobArray]) -> list[LogprobArray]:
    """Joins the outputs of each trajectory's sequences; see `batch_outputs`.

    `outputs` has an array for each sequence of the batch, of the sampled tokens that are predicted.
    """
    remaining = iter(outputs)
    outputs_of_trajectories: list[LogprobArray] = []
    for trajectory in batch.trajectories:
        parts = []
        for part in trajectory.sequences:
            sequence_outputs = next(remaining)
            unpredicted = part.sampled.stop - part.sampled.start - len(sequence_outputs)
            parts += [
                np.zeros((unpredicted, *sequence_outputs.shape[1:]), dtype=np.float32),
                sequence_outputs,
            ]
        outputs_of_trajectories.append(np.concatenate(parts))
    return outputs_of_trajectories
