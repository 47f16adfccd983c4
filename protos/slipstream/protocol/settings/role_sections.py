"""The settings of the models beside the policy: reference and critic."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import Field, JsonValue
from slipstream.protocol.settings.section import Section
from slipstream.protocol.settings.sections import LearnerSection, ParallelSection

# What a role may have in place of the learner's.
_OWN = ("parallel", "ddp", "optimizer", "transformer", "weight_decay", "grad_clip")


class ReferenceSection(Section):
    """The model from which the policy's divergence is measured, in the policy's ranks.

    It exists when `algorithm.kl.coefficient` > 0, with the defaults if the table is left out.
    Without a table `parallel` it has the policy's layout.
    """

    # A Hugging Face folder; None: model.path.
    path: Path | None = None
    # Element type of its parameters; None: model.dtype.
    dtype: Literal["float32", "bfloat16"] | None = None
    # Takes the policy's weights after every n-th step; 0: never.
    refresh_every_steps: int = Field(0, ge=0)
    # A table of its own, below.
    parallel: ParallelSection | None = None
    # As learner.transformer; None: the same.
    transformer: dict[str, JsonValue] | None = None


class CriticSection(Section):
    """The model that estimates what is still to be won; for `algorithm.advantage = "gae"`.

    Its body starts as the policy's, its head from `run.seed`. Mini-batches are the policy's.
    Without a table `parallel` it has the policy's layout.
    """

    # A Hugging Face folder for its body; None: model.path.
    path: Path | None = None
    # Constant.
    learning_rate: float = Field(gt=0)
    # Steps at the start that train the critic alone: the policy's learning rate is 0.
    warmup_steps: int = Field(0, ge=0)
    # How far a value may leave its old one until its loss stops to fall; 0: no bound.
    value_clip: float = Field(0.2, ge=0)
    # Decoupled; not for norms and biases.
    weight_decay: float = Field(0.0, ge=0)
    # Largest gradient norm; 0: no limit.
    grad_clip: float = Field(1.0, ge=0)
    # A table of its own, below.
    parallel: ParallelSection | None = None
    # As learner.ddp; None: the same.
    ddp: dict[str, JsonValue] | None = None
    # As learner.optimizer; None: the same.
    optimizer: dict[str, JsonValue] | None = None
    # As learner.transformer; None: the same.
    transformer: dict[str, JsonValue] | None = None


RoleSection: TypeAlias = ReferenceSection | CriticSection


def in_place_of(learner: LearnerSection, role: RoleSection) -> LearnerSection:
    """The learner's settings with those that the role has of its own."""
    return learner.model_copy(update=_own(role))


def renamed(problem: str, name: str, role: RoleSection) -> str:
    """A sentence on the settings of `in_place_of`, with the names that they have in the file."""
    for key in _own(role):
        problem = re.sub(rf"\blearner\.{key}\b", f"{name}.{key}", problem)
    return re.sub(r"\bmodel\.path\b", f"{name}.path", problem) if role.path else problem


def _own(role: RoleSection) -> dict[str, object]:
    return {key: value for key, value in role if key in _OWN and value is not None}
