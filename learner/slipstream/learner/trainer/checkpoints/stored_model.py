"""A model and its place in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from slipstream.learner.trainer.untyped import Megatron

POLICY = "policy"
# Folder of Megatron's files in a checkpoint.
STATE_FOLDER = "state"


@dataclass(frozen=True)
class StoredModel:
    """A model of a checkpoint; `optimizer` is None for a model that is not trained.

    The policy's tensors have Megatron's names; those of other models have the model's name before.
    """

    name: str
    chunks: Sequence[Megatron]
    optimizer: Megatron | None
    # Puts the model's layout in force, if it differs from the policy's.
    in_force: Callable[[], AbstractContextManager[None]] = nullcontext
