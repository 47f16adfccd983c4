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
import inspect
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
# The runtime whose episodes run on this machine, with its files.
SHARED_FILES = "subprocess"
# Methods of a task that prepare a runtime, for an agent or for the verifier.
STAGES = ("setup", "stage_verifier")
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
        taskset has a harness of its own. Tasks that are worked on in a runtime, such as Harbor's,
        keep verifiers' harness and must name a runtime with files of its own. Raises ConfigError
        for arguments that cannot work.
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
            raise ConfigError(
                f"verifiers refuses {place}: {first['msg']}, got {first['input']!r}"
            ) from error
        except (ImportError, TypeError, AttributeError, ValueError) as error:
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
            episode_env = _of_episode(self._env, endpoint, variable)
            context = ModelContext(model="policy", client=_client(endpoint, variable))
            episode = await episode_env.run_slot(RunSlot(task), context)
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = list(episode.errors)
            for trace in episode.traces:
                errors.extend(trace.errors)
            if errors:
                text = f"{errors[0].type}: {errors[0].message}"
                if "OpenEnv" in text and "ConnectionClosed" in text:
                    text += f"; {CAPACITY}"
                raise RuntimeError(text)
            stops = ", ".join(str(trace.stop_condition) for trace in episode.traces) or "nothing"
            raise RuntimeError(f"verifiers calls the episode not ok; its traces stopped at {stops}")
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

    verifiers' own defaults need a login, or a program that is downloaded for each episode. Ours are
    for tasks that are a conversation. A task that is worked on in a runtime keeps verifiers' own
    harness, which has a shell, and its runtime must be named. Raises ConfigError if it is not, or
    if its episodes would share files.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils import loaders

    taskset_id = table["taskset"].get("id", "")
    needs_shell = _is_worked_on_in_a_runtime(loaders.task_type(taskset_id))
    config_type = loaders.env_config_type(taskset_id, table.get("id", ""))
    default_harness = loaders.default_harness_id(taskset_id)
    for name, field in config_type.model_fields.items():
        declared = field.default
        if not isinstance(declared, AgentConfig):
            continue
        agent = dict(table.get(name) or {})
        if needs_shell:
            _check_runtime(taskset_id, name, agent.get("runtime"))
        else:
            agent.setdefault("runtime", {"type": SHARED_FILES})
        pinned_harness = None if declared.harness is None else declared.harness.id
        is_plain_chat = pinned_harness in REPLACED
        has_default_shell = pinned_harness is None and default_harness == "bash"
        may_chat = is_plain_chat or (has_default_shell and not needs_shell)
        if "harness" not in agent and may_chat:
            agent["harness"] = {"id": CHAT}
        table[name] = agent
    return table


def _is_worked_on_in_a_runtime(task_type: Foreign) -> bool:
    """Whether an agent without a shell could not do what tasks of `task_type` are judged by.

    Such tasks need a container, or have files staged in the runtime before the agent's work and
    rewards that are computed there behind it.
    """
    from verifiers.v1.task import Task

    if task_type.NEEDS_CONTAINER:
        return True
    stages = [getattr(task_type, name) for name in STAGES if _is_overridden(task_type, Task, name)]
    members = [getattr(task_type, name) for name in dir(task_type) if not name.startswith("__")]
    rewards = [member for member in members if getattr(member, "reward", False) is True]
    return any(map(_needs_runtime, stages)) and any(map(_needs_runtime, rewards))


def _is_overridden(kind: type, base: type, name: str) -> bool:
    return getattr(kind, name) is not getattr(base, name)


def _needs_runtime(function: Foreign) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _check_runtime(taskset_id: str, agent_name: str, runtime: object) -> None:
    """Raises ConfigError unless `runtime` gives each episode files of its own."""
    runtime_type = runtime.get("type") if isinstance(runtime, Mapping) else None
    setting = f'env = {{ {agent_name} = {{ runtime = {{ type = "docker" }} }} }}'
    if runtime_type is None:
        raise ConfigError(
            f"tasks of taskset {taskset_id!r} are worked on in a runtime, and none is named: set "
            f"{setting}, or podman, apptainer, modal, e2b or prime"
        )
    if runtime_type == SHARED_FILES:
        raise ConfigError(
            f"tasks of taskset {taskset_id!r} are worked on in a runtime, and episodes of the "
            f"runtime {SHARED_FILES!r} share this machine's files, so that one reads another's "
            f"reward: set {setting}, or podman, apptainer, modal, e2b or prime"
        )


def _of_episode(env: Foreign, endpoint: Endpoint, variable: str) -> Foreign:
    """Returns a copy of `env` whose agents call the model at branches of `endpoint`.

    An agent with its own `client`, such as a judge elsewhere, keeps calling that client.
    """
    from verifiers.v1.configs.agent import agent_config_fields

    episode_env = copy.copy(env)
    clients = {
        name: agent.model_copy(update={"client": _client(endpoint.branch(name), variable)})
        for name, agent in agent_config_fields(env.config).items()
        if agent.client is None
    }
    episode_env.config = env.config.model_copy(update=clients)
    # An agent run gets a server of its own, since a shared server would keep the clients of all
    # past endpoints.
    episode_env._interception = None
    return episode_env


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
    has_several_agents = len({trace.agent.name for trace in traces}) > 1
    values_by_name: dict[str, list[float]] = {}
    for trace in traces:
        numbers = {"turns": float(trace.num_turns), "truncated": float(trace.is_truncated)}
        for name, reward in trace.rewards.items():
            if reward is not None:
                numbers[name] = reward.score
        numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in numbers.items():
            metric = f"{trace.agent.name}_{name}" if has_several_agents else name
            values_by_name.setdefault(metric, []).append(value)
    rewards: dict[str, list[float]] = {}
    for trace in trained:
        rewards.setdefault(trace.agent.name, []).append(trace.reward)
    agent_rewards = {name: fmean(values) for name, values in rewards.items()}
    return AgentOutcome(
        reward=fmean(trace.reward for trace in trained),
        metrics={name: fmean(values) for name, values in values_by_name.items()},
        shares={trace.agent.name: 0.0 for trace in traces if not trace.agent.trainable},
        rewards=agent_rewards if len(agent_rewards) > 1 else {},
    )
