"""The settings of a whole run, checked by all rules that need no file."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator
from slipstream.core.machine.address import address_parts
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.checkpoint_section import CheckpointSection
from slipstream.core.settings.engine_precision import precision_problems
from slipstream.core.settings.engine_table import engine_problems
from slipstream.core.settings.lora_section import LoraSection
from slipstream.core.settings.measurement_rules import length_problems, profile_problems
from slipstream.core.settings.measurement_sections import (
    EvaluationSection,
    ProfileSection,
    TrackingSection,
)
from slipstream.core.settings.parallel_rules import table_problems, world_problems
from slipstream.core.settings.queue_section import QueueSection
from slipstream.core.settings.role_rules import role_problems
from slipstream.core.settings.role_sections import CriticSection, ReferenceSection, served_problems
from slipstream.core.settings.sampling_section import SamplingSection
from slipstream.core.settings.section import Section
from slipstream.core.settings.sections import (
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
from slipstream.core.settings.storage_rules import storage_problems
from slipstream.core.settings.table_rules import (
    algorithm_problems,
    interval_problems,
    lora_problems,
    replay_table_problems,
    size_problems,
)
from slipstream.core.settings.tables import Tables
from slipstream.core.settings.turn_rules import turn_problems
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
        sampling, server = self.sampling, self.rollout_server
        yield from size_problems(self)
        yield from world_problems(self.learner)
        yield from table_problems(self.learner)
        yield from engine_problems(server.engine, max_episodes=server.max_episodes)
        yield from precision_problems(
            server,
            model=self.model,
            learner=self.learner,
            lora=self.lora,
            weights=self.weights,
            algorithms=self.algorithms.distinct,
        )
        yield from storage_problems(server, self.weights, self.lora)
        yield from turn_problems(self.controller, self.learner, server, self.weights)
        yield from length_problems(sampling, self.evaluations)
        yield from profile_problems(self.learner, self.run)
        yield from served_problems(self.reference, self.algorithms, sampling.temperature)
        yield from interval_problems(self)
        yield from algorithm_problems(self)
        yield from replay_table_problems(self)
        yield from role_problems(self.roles, self.learner, sampling)
        yield from lora_problems(self)
