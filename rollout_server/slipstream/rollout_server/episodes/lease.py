"""A lease of the controller, and the server epoch that runs it."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.errors import ProtocolError
from slipstream.core.settings.config import SamplingSection
from slipstream.core.template_values import read_values
from slipstream.core.types import GroupId, Purpose, ServerId
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.v1 import fleet_pb2

_PURPOSES = frozenset(purpose.value for purpose in Purpose)


@dataclass(frozen=True)
class Identity:
    """The sender of deliveries: one epoch of one server of one run."""

    run_id: str
    server_id: ServerId
    server_epoch: int
    # The key that seals the deliveries.
    delivery_key: bytes


@dataclass(frozen=True)
class Lease:
    """Permission to run members of a group, in attempts `first_attempt` .. `max_attempts` - 1."""

    group_id: GroupId
    environment: str
    task_index: int
    seed: int
    members: tuple[int, ...]
    purpose: Purpose
    sampling: Sampling
    first_attempt: int
    max_attempts: int
    # Seconds within which the environment must answer one call.
    timeout_s: float
    # The environment's values for the chat template, a JSON object; "": none.
    template_values: str = ""

    @classmethod
    def from_pb(cls, message: fleet_pb2.Lease, defaults: SamplingSection) -> Lease:
        """The lease of a message; `defaults` apply if the message has no sampling settings.

        ProtocolError for an unknown purpose, or values that no chat template takes.
        """
        if message.purpose not in _PURPOSES:
            raise ProtocolError(
                f"Lease.purpose must be one of {sorted(_PURPOSES)}, got {message.purpose}"
            )
        try:
            read_values(message.chat_template_kwargs_json)
        except ValueError as error:
            raise ProtocolError(f"Lease.{error}") from None
        given = message.sampling if message.HasField("sampling") else defaults.to_pb()
        return cls(
            group_id=GroupId(message.group_id),
            environment=message.environment,
            task_index=message.task_index,
            seed=message.seed,
            members=tuple(message.members),
            purpose=Purpose(message.purpose),
            sampling=Sampling.from_pb(given),
            first_attempt=message.first_attempt,
            max_attempts=message.max_attempts,
            timeout_s=message.timeout_s,
            template_values=message.chat_template_kwargs_json,
        )
