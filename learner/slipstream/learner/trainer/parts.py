"""Makes the parts of a trainer that the settings ask for; the modules of others stay unimported."""

from __future__ import annotations

from typing import Protocol

from slipstream.core.extension import active, resolve
from slipstream.core.settings.config import Config
from slipstream.learner.trainer.controller_client import ControllerClient
from slipstream.learner.trainer.model.policy import Policy
from slipstream.learner.trainer.step import StepPart
from slipstream.learner.trainer.weights.weight_publisher import Published
from slipstream.v1 import trainer_pb2, weights_pb2


class VersionWriter(Protocol):
    """Writes versions of the weights elsewhere; `store` and `close` are collective."""

    @property
    def is_idle(self) -> bool:
        """Whether the newest order is carried out."""

    def store(self, order: trainer_pb2.StoreOrder, probe: weights_pb2.Probe) -> None:
        """Copies the weights, and begins to write them on a thread."""

    def close(self, *, keep: bool = False) -> None:
        """Ends the writing; unless `keep`, no server needs the run's versions any more."""


def step_parts(config: Config, policy: Policy) -> list[StepPart]:
    """Returns the parts of steps, with their models, or raises ConfigError; collective."""
    parts: list[StepPart] = []
    for extension in active(config):
        if extension.trainer:
            part: StepPart | None = resolve(extension.trainer)(config, policy)
            if part is not None:
                parts.append(part)
    return parts


def open_writer(
    config: Config, policy: Policy, published: Published, client: ControllerClient
) -> VersionWriter | None:
    """Returns the writer of versions; None if the trainer sends them to servers."""
    for extension in active(config):
        if extension.writer:
            writer: VersionWriter = resolve(extension.writer)(config, policy, published, client)
            return writer
    return None
