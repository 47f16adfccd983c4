"""The settings of the models besides the policy: reference and critic."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import Field, model_validator
from slipstream.core.settings.algorithm_section import KlSection
from slipstream.core.settings.section import Seconds, Section
from slipstream.core.settings.sections import (
    LearnerSection,
    ParallelSection,
    RoleParallelSection,
)
from slipstream.core.types import MAX_TOP_K


class ReferenceServerSection(Section):
    """A vLLM server that runs the reference model, with OpenAI's API and `prompt_logprobs`.

    Rollout servers send it every episode that may be trained. Its tokenizer must be the policy's.
    """

    # Address of its API, such as http://127.0.0.1:9000/v1.
    base_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?/v1/?$")]
    # Name of the model there.
    model: str
    # File with the server's key, if it asks for one.
    api_key_file: Path | None = None
    # Limit of one call. Beyond it, and after 408, 409, 429, 5xx or a broken connection, the call is
    # repeated, five times at most. Then the episode fails.
    timeout_s: Seconds = 120.0


class ReferenceSection(Section):
    """The model from which the policy's divergence is measured, by default on the policy's ranks.

    It exists when `algorithm.kl.coefficient` > 0. Without a table `parallel`, of `tp`, `pp`, `cp`
    and `ep`, it has the policy's layout. With `lora.rank` > 0, default settings and no
    `algorithm.router_replay`, it is the policy with its adapters switched off, and takes no memory
    of its own.
    """

    # Hugging Face folder, by default `model.path`.
    path: Path | None = None
    # Take the policy's weights after every n-th step. 0 means never.
    refresh_every_steps: int = Field(0, ge=0)
    # A table of its own, below.
    parallel: RoleParallelSection | None = None
    # Most likely tokens of each position, for the top-k estimators. A server gives at most its
    # --max-logprobs, 20 by default.
    top_k: int = Field(0, ge=0, le=MAX_TOP_K)
    # A table of its own, below: the model is behind a server, and the ranks load none.
    server: ReferenceServerSection | None = None

    @model_validator(mode="after")
    def _is_one_model(self) -> ReferenceSection:
        fields = type(self).model_fields
        free = ("server", "top_k")
        others = [k for k, value in self if k not in free and value != fields[k].default]
        if self.server is not None and others:
            raise ValueError(
                f"{others[0]} has no effect with the table server: the ranks load no reference"
            )
        return self


class CriticSection(Section):
    """The model that estimates the expected return, for the advantages `gae` and `turn_gae`.

    Its body starts with the weights in `path`, its head with random weights from `run.seed`. It has
    the policy's mini-batches, the learner's weight decay, bound of gradients and optimizer, and,
    without a table `parallel` like the reference's, the policy's layout.
    """

    # Hugging Face folder of its body, by default `model.path`.
    path: Path | None = None
    # Constant learning rate.
    learning_rate: float = Field(gt=0)
    # First steps, which train the critic alone.
    warmup_steps: int = Field(0, ge=0)
    # Distance from its old value beyond which a value lowers its loss no further. 0 means no bound.
    value_clip: float = Field(0.2, ge=0)
    # A table of its own, below.
    parallel: RoleParallelSection | None = None


def served_problems(
    reference: ReferenceSection | None, kl: KlSection, temperature: float
) -> Iterator[str]:
    """Yields one line for each rule that top-k divergences or a reference server break."""
    top_k = reference.top_k if reference is not None else 0
    if kl.uses_top_k and not top_k:
        yield f"algorithm.kl.estimator = {kl.estimator!r} needs reference.top_k >= 1, got 0"
    if top_k and not kl.uses_top_k:
        yield (
            f"reference.top_k must be 0 unless a kl.estimator is forward_top_k or reverse_top_k, "
            f"got {top_k}"
        )
    if reference is not None and reference.server is not None and temperature != 1.0:
        yield (
            "reference.server needs sampling.temperature = 1: vLLM gives the log-probabilities of "
            f"prompts at temperature 1, got {temperature:g}"
        )


RoleSection: TypeAlias = ReferenceSection | CriticSection


def in_place_of(learner: LearnerSection, role: RoleSection) -> LearnerSection:
    """Returns the learner's settings, with the role's layout, if any, in place of the learner's.

    Layers that the learner's settings assign to pipeline stages do not fit other stages. Experts
    are split as the learner's are, and stages are not virtual.
    """
    if role.parallel is None:
        return learner
    own = ParallelSection(**role.parallel.model_dump(), etp=learner.parallel.etp)
    transformer = learner.transformer
    if (own.pp, own.vpp) != (learner.parallel.pp, learner.parallel.vpp):
        transformer = {k: value for k, value in transformer.items() if "pipeline" not in k}
    return learner.model_copy(update={"parallel": own, "transformer": transformer})


def renamed(problem: str, name: str, role: RoleSection) -> str:
    """Returns `problem`, a message about settings of `in_place_of`, with the role's names for them.

    For example, `learner.parallel` becomes `critic.parallel` if `name` is "critic" and `role` has
    that table, which has no `etp`.
    """
    if role.parallel is not None:
        problem = re.sub(r"\blearner\.parallel\b(?!\.etp)", f"{name}.parallel", problem)
    return re.sub(r"\bmodel\.path\b", f"{name}.path", problem) if role.path else problem
