"""What holds for the episodes of one environment in place of the settings of the whole run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.core.errors import ConfigError
from slipstream.core.extension import active, resolve

if TYPE_CHECKING:
    from slipstream.core.settings.algorithm_section import AlgorithmSection
    from slipstream.core.settings.tables import Tables


@dataclass(frozen=True)
class EnvironmentRules:
    """The rules of one environment."""

    # Factor of the loss of each of its tokens.
    loss_weight: float = 1.0
    # Factor of its divergence from the reference model; None: the run's.
    kl_coefficient: float | None = None
    # Temperature of its sampling and of the learner's logits; None: the run's.
    temperature: float | None = None
    # The run's algorithm with the estimator of its advantages; None: it has none of its own.
    algorithm: AlgorithmSection | None = None
    # The run's algorithm with the loss of its tokens; None: it has none of its own.
    objective: AlgorithmSection | None = None


# The rules of an environment that has none of its own.
PLAIN = EnvironmentRules()


def environment_rules(config: Tables) -> dict[str, EnvironmentRules]:
    """Returns the rules of all environments that have rules of their own, by name.

    Raises ConfigError if two options have rules for one environment.
    """
    rules: dict[str, EnvironmentRules] = {}
    for manifest in active(config):
        if not manifest.environment_rules:
            continue
        rules_of_option = resolve(manifest.environment_rules)(config)
        for name in rules_of_option:
            if name in rules:
                raise ConfigError(
                    f"two options have rules for environment {name}, one of them "
                    f"{manifest.title or manifest.name}: take one of them out"
                )
        rules |= rules_of_option
    return rules


def algorithm_of(config: Tables, environment: str) -> AlgorithmSection:
    """Returns the algorithm whose estimator gives an environment's episodes their advantages."""
    rules = environment_rules(config).get(environment, PLAIN)
    return config.algorithm if rules.algorithm is None else rules.algorithm


def kl_coefficient_of(
    config: Tables, environment: str, rules: Mapping[str, EnvironmentRules]
) -> float:
    """Returns the factor of an environment's divergence; `rules` are those of the settings."""
    own_coefficient = rules.get(environment, PLAIN).kl_coefficient
    return config.algorithm.kl.coefficient if own_coefficient is None else own_coefficient


def objectives_of(config: Tables) -> dict[str, AlgorithmSection]:
    """Returns the algorithms whose losses a step trains: the run's by "", and others by name.

    Environments without a loss of their own are not among the names.
    """
    objectives = {"": config.algorithm}
    for name, rules in environment_rules(config).items():
        if rules.objective is not None:
            objectives[name] = rules.objective
    return objectives


def temperatures_of(config: Tables) -> dict[str, float]:
    """Returns the temperature of each environment that has one of its own, by name."""
    temperatures: dict[str, float] = {}
    for name, rules in environment_rules(config).items():
        if rules.temperature is not None:
            temperatures[name] = rules.temperature
    return temperatures


def sampling_temperatures(config: Tables, environments: Iterable[str]) -> list[float] | None:
    """Returns the temperature of sampling of each environment; None if no one has its own."""
    temperatures = temperatures_of(config)
    if not temperatures:
        return None
    return [temperatures.get(name, config.sampling.temperature) for name in environments]
