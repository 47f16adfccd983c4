"""The classes with which users write an agent: an environment that calls the model itself."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from slipstream.client.environment import Environment

Task = TypeVar("Task")

BRANCH_NAME = re.compile(r"[A-Za-z0-9._:+-]{1,64}")


@dataclass(frozen=True)
class Endpoint:
    """The address at which one episode calls the model, with the API of OpenAI or of Anthropic.

    It serves only this episode: afterwards every call is refused (401). Any name of a model
    works.

        openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        anthropic.AsyncAnthropic(base_url=endpoint.anthropic_url, api_key=endpoint.api_key)
    """

    # The address without `/v1`, as Anthropic's clients want it.
    anthropic_url: str
    # A secret of this episode.
    api_key: str = field(repr=False)

    @property
    def base_url(self) -> str:
        """The address with `/v1`, as OpenAI's clients want it."""
        return f"{self.anthropic_url}/v1"

    def branch(self, name: str) -> Endpoint:
        """Returns the endpoint whose conversations carry `name`; see `AgentOutcome.shares`.

        Raises ValueError for a name that is not 1 to 64 letters, digits and ._:+-
        """
        if BRANCH_NAME.fullmatch(name) is None:
            raise ValueError(f"a branch has 1 to 64 letters, digits and ._:+-, got {name!r}")
        return Endpoint(f"{self._root}/b/{name}", self.api_key)

    def judge(self) -> Endpoint:
        """Returns the endpoint at which the model as the run started replies, with temperature 0.

        It needs `lora.publish = "adapters"`, and `asks_start` in the agent's class. None of its
        tokens are trained.
        """
        return Endpoint(f"{self._root}/judge", self.api_key)

    @property
    def _root(self) -> str:
        return self.anthropic_url.partition("/b/")[0].removesuffix("/judge")

    def variables(self) -> dict[str, str]:
        """Returns the variables with which most programs find the endpoint."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_url,
            "ANTHROPIC_API_KEY": self.api_key,
            # A proxy of the machine does not know this address.
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@dataclass(frozen=True)
class AgentOutcome:
    """The result of one run of an agent.

    `reward` and `metrics` are as in StepResult. `shares` gives the part of the episode's advantage
    that a named branch gets; every other branch gets 1. A named branch in `rewards` has that reward
    in place of the episode's, and is compared only with the group's branches of its name.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    rewards: Mapping[str, float] = field(default_factory=dict)


class AgentEnvironment(Environment[Task]):
    """Base class of agents: `run` takes the place of `reset` and `step`.

    Every episode runs on a shallow copy, as with any environment. An `async def run` shares a
    thread with all other episodes of the worker, so it must await its calls. A plain `def run` has
    a thread of its own and may block.
    """

    # Whether `run` calls `Endpoint.judge`. A run whose servers keep no such model refuses the agent
    # before it starts.
    asks_start: ClassVar[bool] = False

    def run(
        self, task: Task, endpoint: Endpoint
    ) -> float | AgentOutcome | Awaitable[float | AgentOutcome]:
        """Works on `task` with calls to `endpoint`; returns the reward, or an AgentOutcome."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")
