"""Tasks of Harbor 0.26, with one of Harbor's agents and environments.

    [[environments]]
    name = "terminal"
    reference = "slipstream.environments.frameworks.harbor:Harbor"
    python = "venvs/harbor/bin/python"
    args = { tasks = "tasks", agent = "terminus-2" }

Each episode is a trial of Harbor. An agent on the host calls the model on loopback, one inside a
sandbox through a relay; the verifier is told of neither.
"""

import contextlib
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.client import relay_inside
from slipstream.client.environment import AgentEnvironment, AgentOutcome, Endpoint
from slipstream.core.arguments import checked
from slipstream.core.errors import EPISODE_LIMIT, ConfigError
from slipstream.core.machine.files import OwnedFolder

INSTALL = (
    "'harbor>=0.26,<0.27' in a virtual environment of Python 3.12 or newer, and give its "
    "interpreter as `python` of the environment"
)
# Places of the episode's socket and of the relay in a sandbox.
SOCKET = "/run/slipstream/model.sock"
RELAY = "/run/slipstream/relay.py"
# Agents that call no model.
WITHOUT_MODEL = frozenset({"oracle", "nop"})
# Each trial sets these fields by itself, and these of its agent.
TRIAL_FIELDS = frozenset({"task", "agent", "environment", "trials_dir", "trial_name", "job_id"})
AGENT_FIELDS = frozenset({"base_url", "model_api_key_name"})
ENDPOINT_VARIABLES = frozenset(Endpoint(relay_inside.ADDRESS, "", "socket").variables())
# An object of Harbor, whose types are not read here.
Foreign: TypeAlias = Any
Table: TypeAlias = Mapping[str, Any]
Patterns: TypeAlias = Sequence[str]


class Harbor(AgentEnvironment[str]):
    """Plays tasks by trials of Harbor; a task is the path of its folder.

    The reward is the verifier's of the name `reward`; its other rewards are metrics. An episode
    fails where Harbor reports an exception that it would try again, and without that reward. Time
    that an agent has used up is scored, as Harbor does, and so are limits of the episode.
    """

    @checked
    def __init__(
        self,
        tasks: str | Path | Sequence[str | Path],
        *,
        agent: str | Table,
        environment: str | Table = "docker",
        trial: Table | None = None,
        model: str = "openai/policy",
        reward: str = "reward",
        remote: bool = False,
        include: Patterns = ("*",),
        exclude: Patterns = (),
    ) -> None:
        """`tasks` is a task's folder, a folder of such, or a list of both.

        `agent`, `environment` and `trial` are the tables of Harbor's trial configuration; a text is
        the name of an agent, the type of an environment, or "module:Class" of either. Sandboxes
        that are `remote` reach the model by `agents.listen`, others by a socket. `include` and
        `exclude` are patterns of tasks' names. Raises ConfigError for what cannot work.
        """
        try:
            from harbor.agents.factory import AgentFactory
            from harbor.agents.installed.base import BaseInstalledAgent
            from harbor.models.trial.config import TrialConfig
        except ImportError as error:
            raise ConfigError(
                f"harbor cannot be imported ({error}): pip install {INSTALL}"
            ) from error
        self._tasks = _chosen(_task_folders(tasks), include, exclude)
        self._reward = reward
        agent_table = _named(agent, "name")
        trial_table = dict(trial or {})
        _check_free("trial", trial_table, TRIAL_FIELDS)
        _check_free("agent", agent_table, AGENT_FIELDS)
        _check_free("agent.env", agent_table.get("env") or {}, ENDPOINT_VARIABLES)
        self._calls_model = agent_table.get("name") not in WITHOUT_MODEL
        if self._calls_model:
            agent_table.setdefault("model_name", model)
        self._table = {
            **trial_table,
            "agent": agent_table,
            "environment": _named(environment, "type"),
        }
        first_task = {"path": self._tasks[0]}
        try:
            config = TrialConfig.model_validate({**self._table, "task": first_task})
            agent_class = AgentFactory.get_agent_class_from_config(config.agent)
        except (ValueError, ImportError, AttributeError) as error:
            lines = str(error).splitlines()
            cause = " ".join(lines[:3])
            raise ConfigError(f"Harbor refuses the trial: {cause}") from error
        if config.verifier.disable or config.is_regrade:
            raise ConfigError(
                "trial must run the agent and the verifier, whose reward is trained: leave out "
                "verifier.disable, install_only and source_trial"
            )
        is_marked = bool(getattr(agent_class, "runs_inside", False))
        is_inside = is_marked or issubclass(agent_class, BaseInstalledAgent)
        self.needs_socket = is_inside and not remote
        self.needs_url = is_inside and remote

    def tasks(self) -> list[str]:
        return self._tasks

    async def run(self, task: str, endpoint: Endpoint) -> AgentOutcome:
        """Plays a trial of the folder `task`; raises RuntimeError or ValueError if it fails."""
        with contextlib.closing(OwnedFolder("agent")) as owned:
            result = await self._played(task, endpoint, owned.path)
        failure = result.exception_info
        if failure is not None and not _is_scored(failure):
            kind = failure.exception_type
            raise RuntimeError(f"Harbor's trial ended by {kind}: {failure.exception_message}")
        verified = result.verifier_result
        rewards: dict[str, float] = {}
        if verified is not None:
            rewards.update(verified.rewards or {})
        if self._reward not in rewards:
            names = ", ".join(rewards) or "none"
            raise ValueError(f"the verifier gave no reward {self._reward!r}; its rewards: {names}")
        value = rewards.pop(self._reward)
        metrics = {"ended_by_limit": float(failure is not None)}
        for name, number in rewards.items():
            metrics[f"reward_{name}"] = float(number)
        return AgentOutcome(float(value), metrics)

    async def _played(self, task: str, endpoint: Endpoint, folder: Path) -> Foreign:
        """Returns Harbor's result of a trial, whose files lie in `folder`."""
        from harbor.models.trial.config import TrialConfig
        from harbor.trial.hooks import TrialEvent
        from harbor.trial.trial import Trial

        agent = dict(self._table["agent"])
        environment = dict(self._table["environment"])
        if self._calls_model:
            variables = dict(agent.get("env") or {})
            variables.update(endpoint.variables())
            agent["env"] = variables
        if endpoint.socket_path:
            mounts = list(environment.get("mounts") or ())
            mounts.append(_mount(endpoint.socket_path, SOCKET))
            mounts.append(_mount(relay_inside.__file__, RELAY))
            environment["mounts"] = mounts
        table = {
            **self._table,
            "agent": agent,
            "environment": environment,
            "task": {"path": task},
            "trials_dir": str(folder),
        }
        trial = await Trial.create(TrialConfig.model_validate(table))

        async def start_relay(_: object) -> None:
            command = f"python3 {RELAY} {SOCKET} --detach"
            network = {"SLIPSTREAM_NETWORK": relay_inside.network()}
            started = await trial.agent_environment.exec(command, env=network)
            if started.return_code:
                output = f"{started.stdout or ''}{started.stderr or ''}".strip()
                raise RuntimeError(f"the relay in the sandbox did not start: {output}")

        if endpoint.socket_path:
            trial.add_hook(TrialEvent.AGENT_START, start_relay)
        return await trial.run()


def _is_scored(failure: Foreign) -> bool:
    """Whether a trial's reward is final in spite of an exception, as at a timeout.

    Harbor decides, but for a call that a limit of the episode has refused: agents raise different
    errors for it.
    """
    policy = failure.policy
    is_final = policy.has_valid_reward and not policy.should_retry
    return bool(is_final or EPISODE_LIMIT in failure.exception_message)


def _named(table: str | Table, field: str) -> dict[str, Any]:
    """Returns a table of Harbor's for a name, or for "module:Class"."""
    if isinstance(table, str):
        return {"import_path": table} if ":" in table else {field: table}
    return dict(table)


def _mount(source: str, target: str) -> dict[str, Any]:
    return {
        "type": "bind",
        "source": source,
        "target": target,
        "read_only": True,
    }


def _check_free(name: str, table: Table, fields: frozenset[str]) -> None:
    """Raises ConfigError for a field that each episode sets."""
    refused = sorted(fields & table.keys())
    if refused:
        raise ConfigError(f"{name}.{refused[0]} is set for each episode: leave it out")


def _task_folders(tasks: str | Path | Sequence[str | Path]) -> list[Path]:
    """Returns the folders of tasks in the order of their names; raises ConfigError without any."""
    from harbor.models.task.task import Task

    places = [tasks] if isinstance(tasks, str | Path) else tasks
    folders: list[Path] = []
    for text in places:
        place = Path(text).absolute()
        files = sorted(place.glob("*/task.toml"))
        if (place / "task.toml").is_file():
            files = [place / "task.toml"]
        if not files:
            raise ConfigError(f"tasks: {place} has no task of Harbor: a folder with task.toml")
        for file in files:
            folder = file.parent
            if not Task.is_valid_dir(folder):
                raise ConfigError(f"tasks: Harbor does not take {folder}: run `harbor check` on it")
            folders.append(folder)
    return folders


def _chosen(folders: Sequence[Path], include: Patterns, exclude: Patterns) -> list[str]:
    """Returns the folders by patterns of names; raises ConfigError for one that names none."""
    names = [folder.name for folder in folders]
    for pattern in (*include, *exclude):
        if not fnmatch.filter(names, pattern):
            shown = ", ".join(names[:20])
            raise ConfigError(f"no task has a name like {pattern!r}: {shown}")
    chosen = [str(folder) for folder in folders if _is_named(folder.name, include, exclude)]
    if not chosen:
        raise ConfigError("include and exclude leave no task")
    return chosen


def _is_named(name: str, include: Patterns, exclude: Patterns) -> bool:
    """Whether a pattern of `include` names a task, and none of `exclude` does."""
    is_included = any(fnmatch.fnmatch(name, pattern) for pattern in include)
    is_excluded = any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
    return is_included and not is_excluded
