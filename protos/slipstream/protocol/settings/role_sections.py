"""The settings of the models beside the policy: reference and critic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue
from slipstream.protocol.settings.section import Section
from slipstream.protocol.settings.sections import LearnerSection, ParallelSection

# Settings that a role may have in place of the learner's.
_OWN = ("parallel", "ddp", "optimizer", "transformer", "weight_decay", "grad_clip")


class ReferenceSection(Section):
    """The model from which the policy's divergence is measured, on the policy's ranks.

    It exists when `algorithm.kl.coefficient` > 0, with the defaults if the table is left out.
    Without a table `parallel` it has the policy's layout. With `lora.rank` > 0 and the defaults it
    is the policy with its adapters switched off, and takes no memory of its own; not with
    `algorithm.router_replay`.
    """

    # A Hugging Face folder; None: model.path.
    path: Path | None = None
    # Element type of its parameters; None: model.dtype.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Take the policy's weights after every n-th step; 0: never.
    refresh_every_steps: int = Field(0, ge=0)
    # A table of its own, below.
    parallel: ParallelSection | None = None
    # Like learner.transformer; None: the same settings.
    transformer: dict[str, JsonValue] | None = None


class CriticSection(Section):
    """The model that estimates the expected return; for `algorithm.advantage = "gae"`.

    Its body starts like the policy's, its head from `run.seed`. Mini-batches are the policy's.
    Without a table `parallel` it has the policy's layout.
    """

    # A Hugging Face folder for its body; None: model.path.
    path: Path | None = None
    # Learning rate of the critic, constant.
    learning_rate: float = Field(gt=0)
    # First steps that train the critic alone: the policy's learning rate is 0.
    warmup_steps: int = Field(0, ge=0)
    # Distance from its old value beyond which a value lowers its loss no further; 0: no bound.
    value_clip: float = Field(0.2, ge=0)
    # Decoupled weight decay; norms and biases have none.
    weight_decay: float = Field(0.0, ge=0)
    # Largest gradient norm; 0: no limit.
    grad_clip: float = Field(1.0, ge=0)
    # A table of its own, below.
    parallel: ParallelSection | None = None
    # Like learner.ddp; None: the same settings.
    ddp: dict[str, JsonValue] | None = None
    # Like learner.optimizer; None: the same settings.
    optimizer: dict[str, JsonValue] | None = None
    # Like learner.transformer; None: the same settings.
    transformer: dict[str, JsonValue] | None = None


RoleSection: TypeAlias = ReferenceSection | CriticSection


def in_place_of(learner: LearnerSection, role: RoleSection) -> LearnerSection:
    """Returns the learner's settings with the role's own settings over them."""
    return learner.model_copy(update=_own(role))


def renamed(problem: str, name: str, role: RoleSection) -> str:
    """Returns a message about `in_place_of`'s settings with the names that the file uses."""
    for key in _own(role):
        problem = re.sub(rf"\blearner\.{key}\b", f"{name}.{key}", problem)
    return re.sub(r"\bmodel\.path\b", f"{name}.path", problem) if role.path else problem


def _own(role: RoleSection) -> dict[str, object]:
    return {key: value for key, value in role if key in _OWN and value is not None}
