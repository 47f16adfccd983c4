"""The specifications of configured environments, as messages."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.core.settings.config import Config
from slipstream.core.settings.measurement_sections import EvaluationSection
from slipstream.core.settings.sections import EnvironmentSection
from slipstream.core.template_values import values_json
from slipstream.v1 import environment_pb2, trajectory_pb2


def environment_specs(config: Config, *, search_path: str) -> list[environment_pb2.EnvironmentSpec]:
    """The specifications of all configured environments, then of all evaluations."""
    training = [
        _spec(section, search_path, section.weight, trajectory_pb2.EPISODE_PURPOSE_TRAINING)
        for section in config.environments
    ]
    measured = [
        _spec(section, search_path, 1.0, trajectory_pb2.EPISODE_PURPOSE_EVALUATION)
        for section in config.evaluations
    ]
    return training + measured


def _spec(
    section: EnvironmentSection | EvaluationSection,
    search_path: str,
    weight: float,
    purpose: trajectory_pb2.EpisodePurpose,
) -> environment_pb2.EnvironmentSpec:
    return environment_pb2.EnvironmentSpec(
        name=section.name,
        reference=section.reference,
        args_json=json.dumps(section.args),
        weight=weight,
        timeout_s=section.timeout_s,
        num_workers=section.num_workers,
        search_path=search_path,
        purpose=purpose,
        chat_template_kwargs_json=values_json(section.chat_template_kwargs),
        python=str(Path(search_path) / section.python) if section.python else "",
        adapter=section.adapter or "",
    )
