"""What a part of the trainer may do at each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from slipstream.learner.trainer.algorithms.sequences import ModelEstimates
from slipstream.learner.trainer.batches.batch import Batch
from slipstream.learner.trainer.batches.training_sequence import TrainingSequence
from slipstream.learner.trainer.checkpoints.stored_model import StoredModel
from slipstream.learner.trainer.model.model import ParallelModel, Policy
from slipstream.learner.trainer.stage_times import StageTimes


class StepPart:
    """A part of the trainer; it overrides the methods for what it takes part in.

    All methods but `around` and `close` are collective.
    """

    def models(self) -> Mapping[str, ParallelModel]:
        """Returns the models that this part has besides the policy, by name."""
        return {}

    def stored_models(self) -> Sequence[StoredModel]:
        """Returns those of its models that checkpoints must store."""
        return ()

    def around(self, step: int) -> AbstractContextManager[None]:
        """Returns a context for all that the trainer does for step `step`, counted from 1."""
        return nullcontext()

    def begins(self) -> None:
        """Handles the beginning of the training of a batch."""

    def estimates(self, batch: Batch, stages: StageTimes) -> list[ModelEstimates] | None:
        """Returns estimates for each trajectory, the same on every rank; None if it has none."""
        return None

    def train(
        self,
        sequences: Sequence[TrainingSequence],
        mini_batches: Sequence[Sequence[int]],
        stages: StageTimes,
    ) -> dict[str, float]:
        """Trains its models after the policy; returns metrics. `mini_batches` has indices."""
        return {}

    def ends(self, policy: Policy, batch: Batch) -> dict[str, float]:
        """Handles the new weights of the policy after `batch`; returns metrics of the step."""
        return {}

    def close(self) -> None:
        """Handles the end of the run."""


@contextmanager
def around(parts: Sequence[StepPart], step: int) -> Iterator[None]:
    """Enters the contexts of all `parts` for step `step`."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(part.around(step))
        yield
