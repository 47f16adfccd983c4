"""The settings of the algorithm that one environment may have in place of the run's.

The rule: a setting may be an environment's own if it concerns one token, episode or group at a
time. What concerns a whole step, such as a learning rate or a mean over a mini-batch, is the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model, model_validator
from slipstream.core.settings.algorithm_section import (
    READ_BY,
    AlgorithmSection,
    DynamicSamplingSection,
)
from slipstream.core.settings.section import Section

# The settings of the run's algorithm that concern one token, episode or group at a time.
OWN = (
    *("advantage", "loss", "ratio", "clip_low", "clip_high", "dual_clip"),
    *("sapo_tau", "entropy_coefficient"),
    *("correction", "kl", "overlong", "dynamic_sampling"),
)


class _LossWeight(Section):
    # Factor of all losses of the environment's tokens. Means still divide by the tokens of all
    # environments, so that 0.5 halves the environment's gradient and changes no other's.
    loss_weight: float = Field(1.0, gt=0)


def _own_fields() -> dict[str, Any]:
    """Returns type and default of each setting in `OWN`, with None for what is left out."""
    fields = AlgorithmSection.model_fields
    return {
        name: (Annotated[(fields[name].annotation, Field(), *fields[name].metadata)] | None, None)
        for name in OWN
    }


_Settings = create_model("_Settings", __base__=_LossWeight, **_own_fields())


class EnvironmentAlgorithmSection(_Settings):
    """The algorithm for the episodes of one environment.

    What is left out is the run's, in the table `algorithm`. A table here replaces the run's whole
    table. Settings of a step as a whole are refused. `advantage` is `gae` in all environments or in
    none, and is scaled over the environments that have the same kind.
    """

    if TYPE_CHECKING:
        loss_weight: float
        dynamic_sampling: DynamicSamplingSection | None

    @model_validator(mode="before")
    @classmethod
    def _no_setting_of_a_step(cls, table: object) -> object:
        if isinstance(table, dict):
            for name in table:
                if name in AlgorithmSection.model_fields and name not in OWN:
                    raise ValueError(
                        f"{name} concerns whole steps, which hold episodes of all environments: "
                        f"set algorithm.{name} for the run"
                    )
        return table

    @model_validator(mode="after")
    def _one_limit_of_filtered_groups(self) -> EnvironmentAlgorithmSection:
        table = self.dynamic_sampling
        if table is not None and "max_filtered_batches" in table.model_fields_set:
            raise ValueError(
                "dynamic_sampling.max_filtered_batches counts the groups of all environments: "
                "set algorithm.dynamic_sampling.max_filtered_batches for the run"
            )
        return self

    def over(self, algorithm: AlgorithmSection) -> AlgorithmSection:
        """Returns the run's `algorithm` with the settings of this table over it."""
        own = {name: getattr(self, name) for name in self.model_fields_set - {"loss_weight"}}
        loss = own.get("loss", algorithm.loss)
        unread = {name for name, losses in READ_BY.items() if loss not in losses}
        if loss != algorithm.loss:
            fields = AlgorithmSection.model_fields
            own = {name: fields[name].default for name in unread} | own
        return algorithm.model_copy(update=own)

    def refusal(self, algorithm: AlgorithmSection) -> str:
        """The rule that this table breaks with the run's `algorithm` below it; empty: none."""
        own = self.over(algorithm)
        if (own.advantage == "gae") != (algorithm.advantage == "gae"):
            return (
                "advantage must be 'gae' in all environments or in none, because the critic "
                f"values every token, got {own.advantage!r} and algorithm.advantage = "
                f"{algorithm.advantage!r}"
            )
        return next(own.refusals(), "")


@dataclass(frozen=True)
class EnvironmentAlgorithms:
    """The different algorithms of a run, and which of them each environment has."""

    # The run's own comes first.
    distinct: tuple[AlgorithmSection, ...]
    # Index in `distinct`; an environment that is not named has the run's.
    places: dict[str, int]
    # Factors other than 1.
    loss_weights: dict[str, float]

    @classmethod
    def of(
        cls,
        algorithm: AlgorithmSection,
        tables: Sequence[tuple[str, EnvironmentAlgorithmSection | None]],
    ) -> EnvironmentAlgorithms:
        """Makes them from the run's algorithm and the table of each environment."""
        distinct, places, weights = [algorithm], {}, {}
        for name, table in tables:
            if table is None:
                continue
            own = table.over(algorithm)
            if own not in distinct:
                distinct.append(own)
            places[name] = distinct.index(own)
            weights[name] = table.loss_weight
        return cls(tuple(distinct), places, weights)

    @property
    def staleness_warnings(self) -> list[str]:
        """Warnings about tokens of older versions without a correction, each once."""
        found = [each.staleness_warning for each in self.distinct]
        return list(dict.fromkeys(filter(None, found)))

    @property
    def measures_divergence(self) -> bool:
        """Whether an environment needs the reference model."""
        return any(each.kl.coefficient > 0 for each in self.distinct)

    @property
    def samples_dynamically(self) -> bool:
        """Whether groups of equal rewards of an environment are left out."""
        return any(each.dynamic_sampling.enabled for each in self.distinct)

    def place(self, environment: str) -> int:
        """The index in `distinct` of an environment's algorithm."""
        return self.places.get(environment, 0)

    def get(self, environment: str) -> AlgorithmSection:
        """The algorithm of an environment."""
        return self.distinct[self.place(environment)]

    def loss_weight(self, environment: str) -> float:
        """The factor of all losses of an environment's tokens."""
        return self.loss_weights.get(environment, 1.0)
