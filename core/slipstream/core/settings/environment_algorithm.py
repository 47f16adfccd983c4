"""The settings of the algorithm that one environment may have in place of the run's.

The rule: a setting may be an environment's own if it concerns one token, episode or group at a
time. A setting that concerns a whole step, such as a learning rate or a mean over a mini-batch, is
the run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model, model_validator
from slipstream.core.settings.algorithm_functions import checked_arguments
from slipstream.core.settings.algorithm_section import KINDS, AlgorithmSection
from slipstream.core.settings.section import Section

# The settings of the run's algorithm that concern one token, episode or group at a time.
OWN = (
    *(name for kind in KINDS for name in (kind, f"{kind}_args")),
    *("leave_out_truncated", "entropy_coefficient", "kl"),
)


class _LossWeight(Section):
    # Factor of the losses of the environment's tokens. Means still divide by the tokens of all
    # environments.
    loss_weight: float = Field(1.0, gt=0)


def _own_fields() -> dict[str, Any]:
    """Returns the type of each setting in `OWN`, made optional, and None as its default."""
    fields = AlgorithmSection.model_fields
    return {
        name: (Annotated[(fields[name].annotation, Field(), *fields[name].metadata)] | None, None)
        for name in OWN
    }


_Settings = create_model("_Settings", __base__=_LossWeight, **_own_fields())


class EnvironmentAlgorithmSection(_Settings):
    """The algorithm for the episodes of one environment, over the run's table `algorithm`.

    A table in this one replaces the run's whole table. Settings that concern a whole step are
    refused. `advantage` is `gae` in all environments or in none. An advantage's statistics over a
    batch cover all environments with the same function and arguments.
    """

    if TYPE_CHECKING:
        loss_weight: float

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

    def over(self, algorithm: AlgorithmSection) -> AlgorithmSection:
        """Returns the run's `algorithm`, with this table's settings in place of the run's.

        A function other than the run's gets its own default arguments. Raises ValueError for
        arguments that a function does not take.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set - {"loss_weight"}}
        for kind in KINDS:
            name, arguments = own.get(kind, getattr(algorithm, kind)), f"{kind}_args"
            if arguments in own or name != getattr(algorithm, kind):
                own[arguments] = checked_arguments(kind, name, own.get(arguments, {}))
        return algorithm.model_copy(update=own)

    def refusal(self, algorithm: AlgorithmSection) -> str:
        """Returns the rule that this table over `algorithm` breaks, or "" if it breaks none.

        Raises ValueError like `over`.
        """
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
        """Combines the run's algorithm with each environment's own table.

        `tables` has the name and the own table of each environment, None for an environment without
        one. Raises ValueError, which names the environment, if a combination is invalid.
        """
        distinct, places, weights = [algorithm], {}, {}
        for name, table in tables:
            if table is None:
                continue
            try:
                own = table.over(algorithm)
            except ValueError as error:
                raise ValueError(f"algorithm of environment {name}: {error}") from None
            if own not in distinct:
                distinct.append(own)
            places[name] = distinct.index(own)
            weights[name] = table.loss_weight
        return cls(tuple(distinct), places, weights)

    @property
    def staleness_warnings(self) -> list[str]:
        """The distinct warnings about training on stale tokens without a correction."""
        found = [each.staleness_warning for each in self.distinct]
        return list(dict.fromkeys(filter(None, found)))

    @property
    def measures_divergence(self) -> bool:
        return any(each.kl.coefficient > 0 for each in self.distinct)

    @property
    def filters(self) -> bool:
        return any(each.filter != "none" for each in self.distinct)

    @property
    def has_own(self) -> bool:
        return any(each.own_functions for each in self.distinct)

    def place(self, environment: str) -> int:
        """Returns the index of the environment's algorithm in `distinct`."""
        return self.places.get(environment, 0)

    def get(self, environment: str) -> AlgorithmSection:
        """Returns the algorithm of an environment."""
        return self.distinct[self.place(environment)]

    def loss_weight(self, environment: str) -> float:
        """Returns the factor of all losses of an environment's tokens."""
        return self.loss_weights.get(environment, 1.0)
