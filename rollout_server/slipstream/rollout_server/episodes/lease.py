"""A lease of the controller, the episodes that it allows, and the trajectory of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.config import SamplingSection
from slipstream.core.template_values import read_values
from slipstream.core.types import (
    Failure,
    GroupId,
    Purpose,
    RoutedExperts,
    ServerId,
    Status,
    Trajectory,
)
from slipstream.protocol.codec import merge_spans, unpack_tokens
from slipstream.rollout_server.engine_interface import Sampling
from slipstream.rollout_server.episodes.recording import Recording
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.v1 import fleet_pb2

_PURPOSES = frozenset(purpose.value for purpose in Purpose)


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
    # The environment's values for the chat template, a JSON object; "" for no values.
    template_values: str = ""
    # The whole prompt of an episode without an environment; () if the environment gives it.
    prompt: tuple[int, ...] = ()

    @classmethod
    def from_pb(cls, message: fleet_pb2.Lease, defaults: SamplingSection) -> Lease:
        """Returns the lease in `message`; `defaults` apply if it has no sampling settings.

        Raises ProtocolError for an unknown purpose, a torn prompt, or invalid values for the chat
        template.
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
            prompt=tuple(unpack_tokens(message.prompt_token_ids).tolist()),
        )


@dataclass(frozen=True)
class Identity:
    """The origin of deliveries: one epoch of one server of one run."""

    run_id: str
    server_id: ServerId
    server_epoch: int
    # The key that seals the deliveries.
    delivery_key: bytes


@dataclass(frozen=True)
class EpisodeTask:
    """One attempt at one member of a leased group."""

    identity: Identity
    lease: Lease
    member: int
    attempt: int

    @property
    def key(self) -> str:
        """The key that names the episode to its environment; unique in the run."""
        epoch = self.identity.server_epoch
        return f"{self.lease.group_id}.{self.member}.{self.attempt}.{epoch:x}"

    def is_trained(self, status: Status) -> bool:
        """Returns whether an episode that ends with `status` is trained on."""
        has_reward = status in (Status.COMPLETED, Status.TRUNCATED)
        return self.lease.purpose is Purpose.TRAINING and has_reward


def trajectory_of(
    task: EpisodeTask,
    recording: Recording,
    status: Status,
    failure: Failure | None,
    *,
    renderer: Renderer,
    num_experts: int,
) -> Trajectory:
    """Closes `recording`, and returns the trajectory of the attempt.

    `renderer` decodes the trajectory's texts. `num_experts` is the number of experts in each
    mixture-of-experts layer.
    """
    identity, lease = task.identity, task.lease
    recording.close()
    prompt = recording.token_ids[: recording.prompt_tokens]
    if recording.num_turns > 1:
        reply_text = renderer.decode_all(recording.token_ids[recording.prompt_tokens :])
    else:
        reply_text = recording.last_text or renderer.decode(recording.last_reply)
    is_trained, num_tokens = task.is_trained(status), len(recording.token_ids)
    routed_experts = None
    if is_trained and recording.expert_ids:
        # Only training replays the experts, and they take more bytes than all else.
        parts = recording.expert_ids
        routed_experts = RoutedExperts.of_parts(parts, num_experts, num_tokens=num_tokens)
    sampled: dict[str, Any] = recording.sampled_arrays
    return Trajectory(
        run_id=identity.run_id,
        group_id=lease.group_id,
        member=task.member,
        attempt=task.attempt,
        server_id=identity.server_id,
        server_epoch=identity.server_epoch,
        environment=lease.environment,
        task_index=lease.task_index,
        seed=lease.seed,
        purpose=lease.purpose,
        status=status,
        failure=failure,
        token_ids=np.asarray(recording.token_ids, dtype=np.uint32),
        run_lengths=tuple(recording.run_lengths),
        **sampled,
        version_spans=merge_spans(recording.spans),
        reward=recording.reward if failure is None else 0.0,
        metrics=recording.short_metrics,
        num_turns=recording.num_turns,
        generation_s=recording.generation_s,
        environment_s=recording.environment_s,
        prompt_text=recording.clip(renderer.decode_prompt(prompt)),
        reply_text=recording.clip(reply_text),
        routed_experts=routed_experts,
        branches=recording.branches,
        is_given=recording.is_given,
        reference=recording.reference if is_trained else None,
        images=tuple(recording.images),
        image_places=tuple(recording.image_places),
        adapter=lease.sampling.adapter,
        max_reply_tokens=recording.max_reply_tokens,
        expected_answer=recording.expected_answer,
        prompt_logprobs=recording.prompt_logprobs,
    )
