"""Sections about what a run measures and where it writes that."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue
from slipstream.protocol.section import Positive, Reference, Seconds, Section


class EvaluationSection(Section):
    """One environment that is only measured, never trained."""

    # Unique in the run.
    name: Annotated[str, Field(min_length=1, max_length=100)]
    # As for an environment.
    reference: Reference
    # Keyword arguments of the class.
    args: dict[str, JsonValue] = {}
    # Episodes of one evaluation, each of another task as long as there are any.
    num_episodes: Positive = 64
    # Evaluate after every n-th step as well as before the first and after the last one; 0: only
    # these two. A round measures all evaluations, whichever asked for it.
    every_steps: int = Field(0, ge=0)
    # 0: the most probable token.
    temperature: float = Field(1.0, ge=0)
    # Limit of one reset or step.
    timeout_s: Seconds = 60.0
    # Worker processes beside each rollout server.
    num_workers: Positive = 1
