"""The settings of a whole run, checked by all rules that need no file."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.engine_table import engine_problems
from slipstream.core.settings.lora_section import LoraSection
from slipstream.core.settings.measurement_sections import (
    EvaluationSection,
    ProfileSection,
    TrackingSection,
)
from slipstream.core.settings.parallel_rules import table_problems, world_problems
from slipstream.core.settings.queue_section import QueueSection
from slipstream.core.settings.role_sections import CriticSection, ReferenceSection, served_problems
from slipstream.core.settings.sampling_section import SamplingSection
from slipstream.core.settings.section import Section
from slipstream.core.settings.sections import (
    CheckpointSection,
    ControllerSection,
    EnvironmentSection,
    LearnerSection,
    ModelSection,
    OffloadSection,
    ParallelSection,
    RolloutServerSection,
    RunSection,
    SecuritySection,
)
from slipstream.core.settings.table_rules import TABLE_RULES
from slipstream.core.settings.tables import Tables
from slipstream.core.settings.weights_section import WeightsSection

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
]


class Config(Tables):
    """All settings of a run."""

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
