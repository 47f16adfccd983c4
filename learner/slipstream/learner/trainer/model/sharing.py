"""What computes a prefix that several sequences share once, and what the trainer asks of it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.batches.training_sequence import (
    Bundle,
    MicroBatch,
    Paths,
    TrainingSequence,
)

# The positional and named arguments of an attention.
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class SavedWork(NamedTuple):
    """The work that shared prefixes save: tokens, and attention in squares of lengths."""

    tokens: int = 0
    squares: int = 0


class Sharing(Protocol):
    """Packs sequences so that shared prefixes are computed once, and lays out their attention."""

    # Work that sharing saved in the newest step, over all replicas.
    saved: SavedWork

    def begin_step(self) -> None:
        """Counts the saved work from 0."""

    def plan(
        self,
        sequences: Sequence[TrainingSequence],
        members: Sequence[int],
        *,
        max_tokens: int,
        dp_size: int,
        multiple: int,
        attention_length: float,
    ) -> list[list[list[Bundle]]] | None:
        """Returns the bundles of each micro batch of each replica; None if nothing is shared."""

    def positions_of(self, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Returns a context in which the model uses the positions of `micro_batch`."""

    def packed(self, micro_batch: MicroBatch, paths: Paths) -> Megatron:
        """Returns Megatron's packed-sequence parameters for a micro batch with `paths`."""

    def by_paths(
        self,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        shared: Megatron,
    ) -> Arguments:
        """Returns an attention's arguments with keys and values along the paths of `shared`."""
