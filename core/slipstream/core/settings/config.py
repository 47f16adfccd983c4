"""The settings of a whole run, checked by all rules that need no file."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue, model_validator
from slipstream.core.machine.address import address_parts, is_loopback
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.engine_table import engine_problems
from slipstream.core.settings.lora_section import LoraSection
from slipstream.core.settings.measurement_sections import (
    EvaluationSection,
    ProfileSection,
    TrackingSection,
)
from slipstream.core.settings.parallel_rules import table_problems, world_problems
from slipstream.core.settings.role_sections import CriticSection, ReferenceSection, served_problems
from slipstream.core.settings.section import Section
from slipstream.core.settings.sections import (
    CheckpointSection,
    ControllerSection,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    OffloadSection,
    ParallelSection,
    QueueSection,
    RolloutServerSection,
    RunSection,
    SamplingSection,
    SecuritySection,
    WeightsSection,
)
from slipstream.core.settings.table_rules import TABLE_RULES
from slipstream.core.settings.tables import Tables

__all__ = [
    "AlgorithmSection",
    "CheckpointSection",
    "Config",
    "ControllerSection",
    "CriticSection",
    "EnvironmentSection",
    "EvaluationSection",
    "LearnerSection",
    "LoraSection",
    "ModelSection",
    "OffloadSection",
    "ParallelSection",
    "ProfileSection",
    "QueueSection",
    "ReferenceSection",
    "RolloutServerSection",
    "RunSection",
    "SamplingSection",
    "Section",
    "SecuritySection",
    "TrackingSection",
    "WeightsSection",
    "address_parts",
    "told_settings",
]


class Config(Tables):
    """All settings of a run, after the rules between them are checked."""

    def submission_refusal(self, reference: str) -> str:
        """Returns why clients may not submit the environment `reference`, or "" if they may."""
        known, cause = self.security.submitted_modules, ""
        if known is None:
            address = self.controller.address
            if is_loopback(address_parts(address)[0]):
                return ""
            own = [each.reference.partition(":")[0] for each in self.environments]
            known = tuple(dict.fromkeys(own))
            cause = f" (those of the run's environments, since {address} is not loopback)"
        module = reference.partition(":")[0]
        if any(f"{module}.".startswith(f"{each}.") for each in known):
            return ""
        listed = ", ".join(known) or "none"
        return f"security.submitted_modules has no {module}, only {listed}{cause}"

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Config:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        server = self.rollout_server
        yield from world_problems(self.learner)
        yield from table_problems(self.learner)
        yield from engine_problems(server.engine, max_episodes=server.max_episodes)
        yield from served_problems(self.reference, self.algorithms, self.sampling.temperature)
        for rule in TABLE_RULES:
            yield from rule(self)


# Settings that hold or locate secrets, which no tracking service should get.
_UNTOLD = (
    "queue.redis_url",
    "queue.controller",
    "queue.rollout_server",
    "security",
)


def told_settings(config: Config) -> dict[str, JsonValue]:
    """Returns all settings except secrets, by dotted names like `algorithm.max_staleness`."""
    flat: dict[str, JsonValue] = {}

    def flatten(prefix: str, value: JsonValue) -> None:
        if prefix in _UNTOLD:
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                flatten(f"{prefix}.{key}" if prefix else key, inner)
        else:
            flat[prefix] = value

    flatten("", config.model_dump(mode="json"))
    return flat
