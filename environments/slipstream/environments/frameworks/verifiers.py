"""Environments of verifiers 0.4, each named by its taskset.

    [[environments]]
    name = "gsm8k"
    reference = "slipstream.environments.frameworks.verifiers:Verifiers"
    python = "venvs/verifiers/bin/python"
    args = { taskset = { id = "gsm8k-v1", split = "train" } }

Each episode is an episode of verifiers, whose agents call the model through the episode's endpoint.
"""

import asyncio
import copy
import importlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeAlias

from slipstream.client.environment import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.errors import ConfigError

# verifiers needs other versions of packages than vLLM does.
INSTALL = (
    "'verifiers>=0.4,<0.5' in a virtual environment of its own, and give its interpreter as "
    "`python` of the environment"
)
CAPACITY = (
    "a server of OpenEnv closes sessions beyond the max_concurrent_envs of its create_app, which "
    "is 1 unless set: it must hold all episodes that are open at once (rollout_server.max_episodes)"
)
# Harnesses that our in-process one replaces: verifiers would run each as a program per episode, by
# `uv run`.
REPLACED = frozenset({"null"})
CHAT = "slipstream-chat"
# An object of verifiers, whose types are not read here.
Foreign: TypeAlias = Any


class Verifiers(AgentEnvironment[Any]):
    """Plays the tasks of a taskset with the agents of its environment.

    The reward is the mean reward of the trained agents' traces. Each reward and metric of a trace
    becomes a metric. The replies of an agent are a branch with the agent's name; agents that the
    environment does not train have the share 0.

    An episode fails with the error of verifiers if verifiers does not report it as ok.
    """

    def __init__(
        self,
        taskset: str | Mapping[str, Any],
        *,
        env: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
    ) -> None:
        """`taskset`, `env` and `select` are the tables of verifiers' own configuration.

        A `taskset` that is a text is its `id`: an installed package, or a module. An agent without
        `runtime` runs on this machine, and one without `harness` in this process, unless the
        taskset has a harness of its own. Raises ConfigError for arguments that cannot work.
        """
        try:
            importlib.import_module("verifiers.v1")
        except ModuleNotFoundError as error:
            is_first = error.name == "verifiers"
            lacks = "is missing" if is_first else f"needs {error.name!r}, which is missing"
            raise ConfigError(f"the package 'verifiers' {lacks}: pip install {INSTALL}") from error
        from pydantic import ValidationError
        from slipstream.environments.frameworks import verifiers_chat
        from verifiers.v1.configs.select import SelectConfig
        from verifiers.v1.utils import loaders

        # verifiers looks up a harness as a module without a package.
        sys.modules.setdefault(CHAT.replace("-", "_"), verifiers_chat)
        table = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
        try:
            config = loaders.resolve_env_config(_with_defaults({**(env or {}), "taskset": table}))
            self._env = loaders.load_environment(config)
            self._tasks = self._env.taskset.select(SelectConfig.model_validate(dict(select or {})))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the table"
            what = f"verifiers refuses {place}: {first['msg']}, got {first['input']!r}"
            raise ConfigError(what) from error
        except (ModuleNotFoundError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"taskset {table.get('id')!r}: {error}") from error
        self._serving = Serving(self._env)
        self._numbers = itertools.count()

    def tasks(self) -> Iterable[Any]:
        """Returns the chosen tasks: a sequence, or an iterator that may be endless."""
        return list(self._tasks) if self._tasks.bounded else self._tasks

    async def run(self, task: Foreign, endpoint: Endpoint) -> AgentOutcome:
        """Plays one episode of verifiers, and returns its outcome.

        Raises RuntimeError if verifiers does not report the episode as ok.
        """
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.env import RunSlot

        await self._serving.begin()
        # verifiers reads keys from variables. Programs that it starts do not inherit variables with
        # API_KEY in their names.
        variable = f"SLIPSTREAM_API_KEY_{next(self._numbers)}"
        os.environ[variable] = endpoint.api_key
        try:
            own = _of_episode(self._env, endpoint, variable)
            context = ModelContext(model="policy", client=_client(endpoint, variable))
            episode = await own.run_slot(RunSlot(task), context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(each for one in episode.traces for each in one.errors)]
            if errors:
                text = f"{errors[0].type}: {errors[0].message}"
                if "OpenEnv" in text and "ConnectionClosed" in text:
                    text += f"; {CAPACITY}"
                raise RuntimeError(text)
            stops = ", ".join(str(trace.stop_condition) for trace in episode.traces) or "nothing"
            what = "verifiers calls the episode not ok; its traces"
            raise RuntimeError(f"{what} stopped at {stops}")
        return outcome_of(episode.traces)


class Serving:
    """The services that all episodes of the environment share; they run until the worker exits."""

    def __init__(self, env: Foreign) -> None:
        self._env = env
        self._ready: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Starts the services unless they run, and waits until they have started.

        Raises the error with which the start failed.
        """
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._holding = asyncio.get_running_loop().create_task(self._hold(self._ready))
        await asyncio.shield(self._ready)

    async def _hold(self, ready: asyncio.Future[None]) -> None:
        try:
            async with self._env.serving():
                ready.set_result(None)
                # The end of the event loop cancels this task.
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - `begin` raises it, or it is told here
            # The next episode starts the services again.
            self._ready = None
            if ready.done():
                print(f"what the environment shares has ended: {error!r}", file=sys.stderr)
            else:
                ready.set_exception(error)


def _with_defaults(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the environment's table with our defaults for each agent's runtime and harness.

    verifiers' own defaults need a login, or a program that is downloaded for each episode.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils import loaders

    taskset = table["taskset"].get("id", "")
    kind = loaders.env_config_type(taskset, table.get("id", ""))
    usual = loaders.default_harness_id(taskset)
    for name, field in kind.model_fields.items():
        declared = field.default
        if not isinstance(declared, AgentConfig):
            continue
        agent = dict(table.get(name) or {})
        agent.setdefault("runtime", {"type": "subprocess"})
        pinned = None if declared.harness is None else declared.harness.id
        if "harness" not in agent and (pinned in REPLACED or (pinned is None and usual == "bash")):
            agent["harness"] = {"id": CHAT}
        table[name] = agent
    return table


def _of_episode(env: Foreign, endpoint: Endpoint, variable: str) -> Foreign:
    """Returns a copy of `env` whose agents call the model at branches of `endpoint`.

    An agent with its own `client`, such as a judge elsewhere, keeps calling that client.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    own = copy.copy(env)
    clients = {
        name: agent.model_copy(update={"client": _client(endpoint.branch(name), variable)})
        for name, agent in agent_config_fields(env.config).items()
        if agent.client is None
    }
    own.config = env.config.model_copy(update=clients)
    # Each agent run gets a server of its own, since a shared server would keep the clients of all
    # past endpoints.
    own._interception = None
    return own


def _client(endpoint: Endpoint, variable: str) -> Foreign:
    from verifiers.v1.configs.client import EvalClientConfig

    return EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable)


def outcome_of(traces: Sequence[Foreign]) -> AgentOutcome:
    """Returns the result of an episode from its traces.

    Its metrics are means over traces: of each unweighted reward and metric, of `turns` and of
    `truncated`. Raises RuntimeError when the environment trains none of its agents.
    """
    trained = [trace for trace in traces if trace.agent.trainable]
    if not trained:
        raise RuntimeError("the environment trains none of its agents")
    several = len({trace.agent.name for trace in traces}) > 1
    found: dict[str, list[float]] = {}
    for trace in traces:
        told = {"turns": float(trace.num_turns), "truncated": float(trace.is_truncated)}
        told |= {name: each.score for name, each in trace.rewards.items() if each is not None}
        told |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in told.items():
            found.setdefault(f"{trace.agent.name}_{name}" if several else name, []).append(value)
    rewards: dict[str, list[float]] = {}
    for trace in trained:
        rewards.setdefault(trace.agent.name, []).append(trace.reward)
    own = {name: fmean(values) for name, values in rewards.items()} if len(rewards) > 1 else {}
    return AgentOutcome(
        reward=fmean(trace.reward for trace in trained),
        metrics={name: fmean(values) for name, values in found.items()},
        shares={trace.agent.name: 0.0 for trace in traces if not trace.agent.trainable},
        rewards=own,
    )
