"""What an episode is given, and what its kinds work with: lease, recording, waits that can end.

Consumes: calls to the environment, the engine. Produces: recorded replies. Waits for: the one or
the other. Unblocked by: its answer, or `cancel`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from slipstream.core.configuration.reply_ends import ReplyEnds
from slipstream.core.errors import ProtocolError
from slipstream.core.settings.sections import SamplingSection
from slipstream.core.template_values import read_values
from slipstream.core.types import (
    WITHOUT_END,
    GroupId,
    Purpose,
    ReferenceLogprobs,
    ServerId,
    Status,
    VersionSpan,
)
from slipstream.protocol.codec import pack_logprobs, unpack_tokens
from slipstream.rollout_server.agents.call_records import CallRecords
from slipstream.rollout_server.chat import (
    ENDED_BY_MODEL,
    ParsedReply,
    ReplyEnding,
    TemplateInputs,
)
from slipstream.rollout_server.engine_interface import (
    Engine,
    FinishReason,
    Generation,
    GenerationFailed,
    Sampling,
)
from slipstream.rollout_server.episodes.environments import Environments
from slipstream.rollout_server.episodes.recording import Recording, ScoredSequence
from slipstream.rollout_server.episodes.renderer import Renderer
from slipstream.rollout_server.usage import EpochCounters
from slipstream.v1 import fleet_pb2

if TYPE_CHECKING:
    from slipstream.rollout_server.agents.agent_api import Answering


Answer = TypeVar("Answer")


class EpisodeAttempt:
    """One attempt at a member of a group: what is recorded of it, and all that it may wait for."""

    def __init__(
        self,
        identity: Identity,
        lease: EpisodeLease,
        member: int,
        attempt: int,
        services: EpisodeServices,
        counters: EpochCounters,
        *,
        begins_anew: bool = False,
    ) -> None:
        self.identity = identity
        # Whether what earlier attempts have sampled is left behind.
        self.begins_anew = begins_anew
        # Whether its agent's program was lost with its worker, and how many of its calls are kept
        # for a later attempt.
        self.was_lost = False
        self.num_kept_calls = 0
        self.lease = lease.ended_at(services.model.renderer.ends)
        self.member = member
        self.attempt = attempt
        # The name of the episode for its environment; unique in the run.
        self.key = f"{lease.group_id}.{member}.{attempt}.{identity.server_epoch:x}"
        self.services = services
        self.model = services.model
        self.recording = Recording()
        self.counters = counters
        self._requests = services.model.engine.requests
        self._is_cancelled = False
        # The call to the environment that is being awaited.
        self._waiting: asyncio.Future[Any] | None = None

    async def ask(self, call: Awaitable[Answer]) -> Answer:
        """Awaits the answer to `call`. Raises Cancelled if `cancel` is called meanwhile."""
        self._waiting = waiting = asyncio.ensure_future(call)
        if self._is_cancelled:
            waiting.cancel()
        started_s = time.monotonic()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self._is_cancelled:
                waiting.cancel()
                raise
            raise Cancelled from None
        finally:
            self._waiting = None
            self.recording.environment_s += time.monotonic() - started_s

    async def generate(self, max_tokens: int) -> Generation:
        """Samples and records a reply of at most `max_tokens` tokens.

        Raises Cancelled like `ask`, and GenerationFailed if the engine does not complete the reply.
        """
        if self._is_cancelled:
            raise Cancelled
        recording = self.recording
        started_s = time.monotonic()
        try:
            generation = await self._requests.generate(
                self.key,
                recording.conversation,
                self.lease.sampling,
                max_tokens,
                experts_from=recording.num_routed - recording.start,
                images=recording.conversation_images,
            )
        finally:
            recording.generation_s += time.monotonic() - started_s
        recording.add_generation(generation)
        self.count(generation)
        if self._is_cancelled:
            raise Cancelled
        if generation.finish_reason in (FinishReason.CANCELLED, FinishReason.FAILED):
            raise GenerationFailed(f"the engine abandoned the request: {generation.finish_reason}")
        return generation

    def count(self, generation: Generation, *, is_recovered: bool = False) -> None:
        """Counts the tokens of a reply, and a reply that stopped at none of its ends.

        One that `is_recovered` was sampled for an earlier attempt, whose epoch has counted it.
        """
        num_tokens = len(generation.token_ids)
        if is_recovered:
            self.counters.given(num_tokens)
        else:
            self.counters.sampled(num_tokens)
        if generation.finish_reason is not FinishReason.STOP or generation.stop_text:
            return
        sampling = self.lease.sampling
        model_ends = () if sampling.ignore_eos else self.model.renderer.ends.model
        last_token = set(generation.token_ids[-1:].tolist())
        if last_token.isdisjoint((*model_ends, *sampling.stop_token_ids)):
            self.recording.counts[WITHOUT_END] += 1

    def give(self, tokens: Sequence[int]) -> None:
        """Records a reply that the environment gave in place of the model.

        The reply's log-probabilities are 0, since the environment would give the same reply again.
        Its version is the version that the engine serves now. Raises GenerationFailed before the
        first version.
        """
        version = self.model.engine.pauses.version
        if version is None:
            raise GenerationFailed("the engine has no weights yet")
        generation = Generation(
            np.asarray(tokens, dtype=np.uint32),
            np.zeros(len(tokens), dtype=np.float32),
            (VersionSpan(len(tokens), version),),
            FinishReason.STOP,
        )
        self.recording.add_generation(generation)
        self.recording.last_text = None
        self.counters.given(len(tokens))

    async def cancel(self) -> None:
        """Ends the present wait and all later ones, each of which raises Cancelled."""
        self._is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        await self._requests.cancel(self.key)

    def is_trained(self, status: Status) -> bool:
        """Returns whether the episode is trained on if it ends with `status`."""
        has_reward = status in (Status.COMPLETED, Status.TRUNCATED)
        return self.lease.purpose is Purpose.TRAINING and has_reward


class Reader(Protocol):
    """Reads reasoning and tool calls in whole replies."""

    def read(
        self,
        prompt: Sequence[int],
        token_ids: Sequence[int],
        inputs: TemplateInputs,
        ending: ReplyEnding = ENDED_BY_MODEL,
    ) -> ParsedReply:
        """Returns the parts of a sampled reply to `prompt`, which was rendered with `inputs`.

        A call whose text did not end is content. Raises GenerationFailed if the reply cannot be
        read.
        """


class AgentApi(Protocol):
    """What episodes need of a model beside its engine; each part is opened at first use."""

    # Whether the run has a parser for tool calls, and one for thoughts, in replies.
    takes_tools: bool
    reads_thoughts: bool

    async def reader(self, inputs: TemplateInputs) -> Reader | None:
        """Returns the reader of replies to prompts with `inputs`, or None if none is needed.

        Raises ConfigError if it does not start, EnvironmentFailed for tools that it cannot read.
        """

    async def api(self) -> Answering:
        """Returns the API for agents. Raises ConfigError if it does not start."""


class References(Protocol):
    """The reference models of a run for which servers answer."""

    def score(self, environment: str) -> bool:
        """Whether one of them is the reference of an environment."""

    async def logprobs(
        self, environment: str, sequences: Sequence[ScoredSequence]
    ) -> ReferenceLogprobs:
        """Returns the sampled tokens' log-probabilities by the environment's reference.

        Raises ServiceFailed.
        """


@dataclass(frozen=True)
class ServedModel:
    """The model of a server: its engine, its chat template, and its API for agents."""

    engine: Engine
    renderer: Renderer
    agents: AgentApi


@dataclass(frozen=True)
class EpisodeServices:
    """The parts of a server that its episodes share."""

    model: ServedModel
    environments: Environments
    # The servers of reference models; None if no server answers for any.
    references: References | None = None
    # Keeps the answered calls of agents; None where an episode that is lost begins anew.
    call_records: CallRecords | None = None
    # Calls of agents from elsewhere that were refused so far.
    refused_agents: Callable[[], int] = lambda: 0


class ServiceFailed(Exception):
    """Raised if a service that an episode needs gave no answer; the episode fails."""


class PromptTooLong(Exception):
    """Raised if the first messages exceed their limit or leave no room for a reply."""

    @classmethod
    def for_reply(cls, length: str, limit: int) -> PromptTooLong:
        """Returns the error for a prompt of `length` in an episode of `limit` tokens."""
        return cls(
            f"a prompt of {length} leaves no room for a reply within "
            f"sampling.max_episode_tokens = {limit}"
        )


class Cancelled(Exception):  # noqa: N818 - no error
    """Raised by the waits of a `EpisodeAttempt` that was cancelled."""


_PURPOSES = frozenset(purpose.value for purpose in Purpose)


@dataclass(frozen=True)
class EpisodeLease:
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
    # Whether the run has a reference model.
    has_reference: bool = False

    def ended_at(self, ends: ReplyEnds) -> EpisodeLease:
        """Returns the lease whose replies also end at the chat template's end.

        A client that gives the whole prompt states the ends itself, and `ignore_eos` leaves all
        ends but the stated ones out.
        """
        if self.prompt or self.sampling.ignore_eos:
            return self
        token_ids = dict.fromkeys((*self.sampling.stop_token_ids, *ends.template))
        sampling = dataclasses.replace(self.sampling, stop_token_ids=tuple(token_ids))
        return dataclasses.replace(self, sampling=sampling)

    @classmethod
    def from_pb(cls, message: fleet_pb2.Lease, defaults: SamplingSection) -> EpisodeLease:
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
        sampling = message.sampling if message.HasField("sampling") else defaults.to_pb()
        return cls(
            group_id=GroupId(message.group_id),
            environment=message.environment,
            task_index=message.task_index,
            seed=message.seed,
            members=tuple(message.members),
            purpose=Purpose(message.purpose),
            sampling=Sampling.from_pb(sampling),
            first_attempt=message.first_attempt,
            max_attempts=message.max_attempts,
            timeout_s=message.timeout_s,
            template_values=message.chat_template_kwargs_json,
            prompt=tuple(unpack_tokens(message.prompt_token_ids).tolist()),
            has_reference=message.has_reference,
        )


@dataclass(frozen=True)
class Identity:
    """The origin of deliveries: one epoch of one server of one run."""

    run_id: str
    server_id: ServerId
    server_epoch: int
    # The key that seals the deliveries.
    delivery_key: bytes


async def reply_alone(play: EpisodeAttempt) -> Status:
    """Samples the only reply to the prompt of the lease; returns how it ended."""
    recording = play.recording
    lease = play.lease
    recording.add_context(list(lease.prompt))
    room = recording.room(lease.sampling)
    if room < 1:
        limit = lease.sampling.max_episode_tokens
        raise PromptTooLong.for_reply(f"{len(lease.prompt)} tokens", limit)
    generation = await play.generate(min(room, lease.sampling.max_reply_tokens))
    if generation.prompt_logprobs is not None:
        recording.prompt_logprobs = pack_logprobs(generation.prompt_logprobs)
    is_cut = generation.finish_reason is FinishReason.LENGTH
    return Status.TRUNCATED if is_cut else Status.COMPLETED
