"""What a checkpoint holds of one model, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from slipstream.learner.trainer.model.settings import Megatron

POLICY = "policy"
# Of a checkpoint: Megatron's files.
STATE_FOLDER = "state"


@dataclass(frozen=True)
class StoredModel:
    """A model of a checkpoint; `optimizer` is None for one that is not trained.

    The policy's tensors have Megatron's own names; those of other models have theirs before it.
    """

    name: str
    chunks: Sequence[Megatron]
    optimizer: Megatron | None
    # Puts the model's layout in force, where it is not the policy's.
    in_force: Callable[[], AbstractContextManager[None]] = nullcontext
