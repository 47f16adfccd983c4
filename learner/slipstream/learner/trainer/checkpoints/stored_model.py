"""A model as it is stored in a checkpoint."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from slipstream.learner.trainer import Megatron
from slipstream.learner.trainer.model.model import Policy
from torch import Tensor

POLICY = "policy"
# Folder of Megatron's files in a checkpoint.
STATE_FOLDER = "state"


@dataclass(frozen=True)
class StoredModel:
    """A model of a checkpoint; `optimizer` is None for a model that is not trained.

    The policy's tensors have Megatron's names; tensors of other models are prefixed with `name`.
    """

    name: str
    chunks: Sequence[Megatron]
    optimizer: Megatron | None
    # Puts the model's layout in force, if it differs from the policy's.
    in_force: Callable[[], AbstractContextManager[None]] = nullcontext
    # The stored part: all of the model, all but adapters, or the adapter that `in_force` activates.
    content: Literal["all", "base", "adapter"] = "all"

    def parameters(self) -> list[Tensor]:
        """Returns this rank's parameters that are stored."""
        found = [p for chunk in self.chunks for p in chunk.parameters()]
        if self.content == "all":
            return found
        return [p for p in found if p.requires_grad == (self.content == "adapter")]

    def chosen(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the entries of a model chunk's `state` that are stored."""
        if self.content == "all":
            return state
        is_adapter = self.content == "adapter"
        return {name: part for name, part in state.items() if (".adapter." in name) == is_adapter}


def stored_policy(policy: Policy, *, with_optimizer: bool = True) -> list[StoredModel]:
    """Returns the policy as stored models; with named adapters, the base model and each adapter."""
    chunks, optimizer = policy.chunks, policy.optimizer if with_optimizer else None
    adapters = policy.adapters
    if not adapters.have_names:
        return [StoredModel(POLICY, chunks, optimizer)]
    return [
        StoredModel(POLICY, chunks, None, content="base"),
        *(stored_adapter(policy, name, name, optimizer) for name in adapters.names),
        *(
            StoredModel(
                f"served-{name}",
                chunks,
                None,
                in_force=partial(adapters.published, name),
                content="adapter",
            )
            for name in (adapters.names if adapters.are_clients else ())
        ),
    ]


def stored_adapter(policy: Policy, name: str, own: str, optimizer: Megatron | None) -> StoredModel:
    """Returns the adapter that a checkpoint has as `name`, for the policy's adapter `own`."""
    return StoredModel(
        f"adapter-{name}",
        policy.chunks,
        optimizer,
        in_force=partial(policy.adapters.active, own),
        content="adapter",
    )
