"""What the kinds of episodes work with: the recording, and waits that a cancellation ends.

Consumes: calls to the environment, the engine. Produces: recorded replies. Waits for: the one or
the other. Unblocked by: its answer, or `cancel`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from slipstream.core.types import ReferenceLogprobs, VersionSpan
from slipstream.rollout_server.chat import ParsedReply, TemplateInputs
from slipstream.rollout_server.engine_interface import (
    Engine,
    FinishReason,
    Generation,
    GenerationFailed,
)
from slipstream.rollout_server.episodes.environments import Environments
from slipstream.rollout_server.episodes.epoch_counters import EpochCounters
from slipstream.rollout_server.episodes.lease import EpisodeTask
from slipstream.rollout_server.episodes.recording import Recording, ScoredSequence
from slipstream.rollout_server.episodes.renderer import Renderer

if TYPE_CHECKING:
    from slipstream.rollout_server.agents.agent_api import Answering

Answer = TypeVar("Answer")


class Play:
    """One episode under way: what is recorded of it, and all that it may wait for."""

    def __init__(
        self, task: EpisodeTask, services: EpisodeServices, counters: EpochCounters
    ) -> None:
        self.task, self.lease, self.model = task, task.lease, services.model
        self.recording, self.counters = Recording(), counters
        self._requests = services.model.engine.requests
        self._is_cancelled = False
        # The call to the environment that is being awaited.
        self._waiting: asyncio.Future[Any] | None = None
        self._generating = False

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
        recording, started_s = self.recording, time.monotonic()
        self._generating = True
        try:
            generation = await self._requests.generate(
                self.task.key,
                recording.conversation,
                self.lease.sampling,
                max_tokens,
                experts_from=recording.num_routed,
                images=recording.conversation_images,
            )
        finally:
            self._generating = False
            recording.generation_s += time.monotonic() - started_s
        recording.add_reply(generation)
        self.counters.sampled(len(generation.token_ids))
        if self._is_cancelled:
            raise Cancelled
        if generation.finish_reason in (FinishReason.CANCELLED, FinishReason.FAILED):
            raise GenerationFailed(f"the engine abandoned the request: {generation.finish_reason}")
        return generation

    def give(self, tokens: Sequence[int], finish_reason: FinishReason) -> Generation:
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
            finish_reason,
        )
        self.recording.add_reply(generation)
        self.counters.given(len(tokens))
        return generation

    async def cancel(self) -> None:
        """Ends the present wait, and all later ones."""
        self._is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        if self._generating:
            await self._requests.cancel(self.task.key)


class Reader(Protocol):
    """Reads reasoning and tool calls in whole replies."""

    def check(self, inputs: TemplateInputs) -> None:
        """Raises EnvironmentFailed for tools in `inputs` that cannot be read."""

    def read(
        self, prompt: Sequence[int], token_ids: Sequence[int], inputs: TemplateInputs
    ) -> ParsedReply:
        """Returns the parts of a sampled reply to `prompt`, which was rendered with `inputs`.

        Raises GenerationFailed if the reply cannot be read.
        """


class AgentApi(Protocol):
    """What episodes need of a model beside its engine; each part is opened at first use."""

    @property
    def takes_tools(self) -> bool:
        """Whether the run has a parser for tool calls in replies."""

    @property
    def reads_thoughts(self) -> bool:
        """Whether the run has a parser for thoughts in replies."""

    async def reader(self, inputs: TemplateInputs) -> Reader | None:
        """Returns the reader of replies to prompts with `inputs`, or None if none is needed.

        Raises ConfigError if it does not start.
        """

    async def api(self) -> Answering:
        """Returns the API for agents. Raises ConfigError if it does not start."""


class References(Protocol):
    """The reference model of a run, where a server answers for it."""

    async def logprobs(self, sequences: Sequence[ScoredSequence]) -> ReferenceLogprobs:
        """Returns the log-probabilities of the sampled tokens. Raises ServiceFailed."""


@dataclass(frozen=True)
class Model:
    """The model of a server: its engine, its chat template, and its API for agents."""

    engine: Engine
    renderer: Renderer
    agents: AgentApi


@dataclass(frozen=True)
class EpisodeServices:
    """The parts of a server that its episodes share."""

    model: Model
    environments: Environments
    # The server of the reference model; None if the run has none.
    reference: References | None = None


class ServiceFailed(Exception):
    """Raised if a service that an episode needs gave no answer; the episode fails."""


class Cancelled(Exception):  # noqa: N818 - no error
    """Raised by the waits of a `Play` that was cancelled."""
