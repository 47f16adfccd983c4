"""Environments of the settings in their wire form."""

from __future__ import annotations

import json

from slipstream.protocol.config import Config
from slipstream.v1 import environment_pb2, trajectory_pb2


def environment_spec(
    config: Config, name: str, *, search_path: str
) -> environment_pb2.EnvironmentSpec:
    """The wire form of a configured environment or evaluation."""
    for section in config.environments:
        if section.name == name:
            return environment_pb2.EnvironmentSpec(
                name=name,
                reference=section.reference,
                args_json=json.dumps(section.args),
                weight=section.weight,
                timeout_s=section.timeout_s,
                num_workers=section.num_workers,
                search_path=search_path,
                purpose=trajectory_pb2.EPISODE_PURPOSE_TRAINING,
            )
    evaluation = next(section for section in config.evaluations if section.name == name)
    return environment_pb2.EnvironmentSpec(
        name=name,
        reference=evaluation.reference,
        args_json=json.dumps(evaluation.args),
        weight=1.0,
        timeout_s=evaluation.timeout_s,
        num_workers=evaluation.num_workers,
        search_path=search_path,
        purpose=trajectory_pb2.EPISODE_PURPOSE_EVALUATION,
    )
