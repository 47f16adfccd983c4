"""Loads and calls the functions of an algorithm: built-in ones, or a user's own `module:function`.

Built-in and own functions are called alike. An error in a function is reported in one line, with
the function's kind and name and the place of the error. Groups of trajectories are converted to the
inputs of reward functions and filters.
"""

import functools
import importlib
import inspect
import json
import math
import numbers
import os
import re
import sys
import traceback
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, create_model
from slipstream.core.configuration.function_sources import source_digests
from slipstream.core.errors import ConfigError, RunFailed
from slipstream.core.extension import resolve
from slipstream.core.settings.algorithm_section import AlgorithmSection, is_own, row_of, validated
from slipstream.core.settings.config import Config
from slipstream.core.settings.function_table import FUNCTIONS_OF_TOKENS, KINDS, FunctionKind
from slipstream.core.types import Branch, Status, Trajectory
from slipstream.learner.algorithms.columns import TAKEN
from slipstream.learner.algorithms.episodes import (
    RewardedEpisode,
    ShapedReward,
)

_FOLDER = __package__
_REPORT = re.compile(r"[a-z][a-z0-9_/]*")


@dataclass(frozen=True)
class Function:
    """A function of an algorithm; its configured arguments are already bound to `call`."""

    kind: FunctionKind
    name: str
    call: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def is_own(self) -> bool:
        return is_own(self.name)

    def fault(self, what: str, where: str) -> RunFailed:
        """Returns the error to raise for a fault of the function: what is wrong, and where."""
        return RunFailed(f"{self} at {where}: {what}")

    @contextmanager
    def named(self, where: str) -> Iterator[None]:
        """Turns an exception in the block into a RunFailed with the function's name and `where`."""
        try:
            yield
        except RunFailed:
            raise
        except (Exception, SystemExit) as error:
            raise self.fault(describe_error(error), where) from error

    def check_reports(self, names: Iterable[str], where: str) -> None:
        """Raises RunFailed if a report's name is malformed or is already the name of a metric."""
        for name in names:
            if _REPORT.fullmatch(name) is None:
                raise self.fault(f"the report {name} needs a name of a-z, 0-9, _ and /", where)
            if name in TAKEN:
                raise self.fault(f"the report {name} has the name of another metric", where)

    def check_numbers(self, reports: Mapping[str, float], where: str) -> None:
        """Raises RunFailed if a report of an episode has a wrong name or is no finite number."""
        self.check_reports(reports, where)
        for name, value in reports.items():
            if not is_number(value):
                raise self.fault(f"the report {name} is no finite number: {value!r}", where)


def is_number(value: object) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def function_of(algorithm: AlgorithmSection, kind: FunctionKind) -> Function:
    """Returns the algorithm's function of this `kind`; raises ConfigError if it does not load."""
    arguments = getattr(algorithm, f"{kind}_args")
    return _loaded(kind, getattr(algorithm, kind), json.dumps(arguments, sort_keys=True))


def named_loss(name: str, arguments: Mapping[str, float]) -> Function:
    """Returns the loss `name`, built-in or a user's; raises ConfigError if it does not load."""
    return _loaded("loss", name, json.dumps(arguments, sort_keys=True))


def load_functions(config: Config, kinds: Sequence[FunctionKind] = KINDS) -> None:
    """Loads the functions of these `kinds` of the algorithm.

    Raises ConfigError if a function cannot be loaded, or if the source of a user's own function has
    changed since the run was started.
    """
    for kind in kinds:
        function_of(config.algorithm, kind)
    check_sources(config, config.algorithm.own_functions.values())


def check_sources(config: Config, names: Iterable[str]) -> None:
    """Raises ConfigError if the source of a function has changed since the run was started."""
    for name, digest in source_digests(names).items():
        if config.sources.get(name, digest) != digest:
            raise ConfigError(f"the source of {name} is not that with which the run was started")


def used_functions(config: Config) -> dict[str, str]:
    """Returns the source digests of the user's own functions, keyed by "kind name arguments"."""
    algorithm = config.algorithm
    return {
        f"{kind} {name} {json.dumps(getattr(algorithm, f'{kind}_args'), sort_keys=True)}": digest
        for kind, name in algorithm.own_functions.items()
        if (digest := config.sources.get(name)) is not None
    }


# A client's passes bring arguments of their own.
@functools.lru_cache(maxsize=256)
def _loaded(kind: FunctionKind, name: str, arguments: str) -> Function:
    parsed = json.loads(arguments)
    row = row_of(kind, name)
    if row is not None and row.place:
        call = resolve(row.place)
        return Function(kind, name, functools.partial(call, **parsed))
    if row is not None:
        # Weights are functions of the same tokens as losses.
        file = "losses" if kind in FUNCTIONS_OF_TOKENS else f"{kind}s"
        module = importlib.import_module(f"{_FOLDER}.{file}")
        function = getattr(module, name)
        return Function(kind, name, functools.partial(function, **parsed))
    call = imported_function(f"algorithm.{kind} {name}", name)
    try:
        checked = checked_arguments(call, parsed, what=f"{kind} {name}")
    except ValueError as error:
        raise ConfigError(f"algorithm.{kind}_args: {error}") from error
    return Function(kind, name, functools.partial(call, **checked))


def imported_function(what: str, name: str) -> Callable[..., Any]:
    """Imports and returns "module:function"; raises ConfigError, which begins with `what`."""
    module_name, _, function_name = name.partition(":")
    # Modules are also imported from the folder in which the run was started, like environments'.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what}: import of {module_name} in {folder} or Python's path "
            f"failed: {describe_error(error)}"
        ) from error
    function = vars(module).get(function_name)
    if not inspect.isfunction(function):
        kind = "no function" if function is None else f"{type(function).__name__}, no function,"
        raise ConfigError(f"{what}: {module_name} has {kind} {function_name}")
    return function


def checked_arguments(
    call: Callable[..., Any], values: Mapping[str, Any], *, what: str
) -> dict[str, Any]:
    """Returns `values`, validated by keyword-only parameters; raises ValueError about `what`."""
    try:
        signature = inspect.signature(call)
        types = typing.get_type_hints(call, include_extras=True)
    except Exception as error:
        raise ValueError(f"annotations of {what}: {describe_error(error)}") from error
    parameters = [*signature.parameters.values()]
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise ValueError(f"{what} takes no inputs: they are its first parameter")
    fields: dict[str, Any] = {}
    for parameter in parameters[1:]:
        if parameter.kind is not parameter.KEYWORD_ONLY:
            raise ValueError(
                f"{what} takes its inputs, and arguments behind a star: not {parameter}"
            )
        if parameter.name not in types:
            raise ValueError(f"the argument {parameter.name!r} of {what} needs an annotation")
        required = parameter.default is parameter.empty
        fields[parameter.name] = (types[parameter.name], ... if required else parameter.default)
    strict = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    model = create_model("Arguments", __config__=strict, **fields)
    return dict(validated(model, values, what=what))


def rewarded(
    algorithm: AlgorithmSection, group: Sequence[RewardedEpisode], *, where: str
) -> list[RewardedEpisode]:
    """Returns a group's episodes with their shaped rewards; raises RunFailed about `where`."""
    function = function_of(algorithm, "reward")
    with function.named(where):
        results = list(function.call(tuple(group)))
    if len(results) != len(group):
        raise function.fault(f"{len(results)} rewards of {len(group)} episodes", where)
    shaped = [
        result if isinstance(result, ShapedReward) else ShapedReward(result) for result in results
    ]
    for shaped_reward in shaped:
        if not is_number(shaped_reward.reward):
            raise function.fault(f"a reward is no finite number: {shaped_reward.reward!r}", where)
        function.check_numbers(shaped_reward.reports, where)
    return [
        replace(episode, changed_reward=float(shaped_reward.reward), reports=shaped_reward.reports)
        for episode, shaped_reward in zip(group, shaped, strict=True)
    ]


def filtered(algorithm: AlgorithmSection, group: Sequence[RewardedEpisode], *, where: str) -> bool:
    """Whether `algorithm.filter` keeps a group; raises RunFailed if the function is faulty."""
    function = function_of(algorithm, "filter")
    with function.named(where):
        keeps = function.call(tuple(group))
    if not isinstance(keeps, bool | np.bool_):
        raise function.fault(f"the result is neither true nor false: {keeps!r}", where)
    return bool(keeps)


def _is_caller(frame: traceback.FrameSummary) -> bool:
    """Whether a frame is of the code that calls an estimator of advantages, not of one."""
    is_beside = Path(frame.filename).parent == Path(__file__).parent
    return is_beside and frame.name == "token_advantages"


def describe_error(error: BaseException) -> str:
    """Returns one line: an error's type and message, and the line of the user's code, if known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    libraries = (*map(str, Path(np.__file__).parents[1:2]), sys.base_prefix, "<")
    user_frames = [
        frame
        for frame in frames
        if not frame.filename.startswith((*libraries, __file__)) and not _is_caller(frame)
    ]
    return (
        f"{line} ({Path(user_frames[-1].filename).name}:{user_frames[-1].lineno})"
        if user_frames
        else line
    )


def side_of(branch: Branch) -> str:
    """Returns the side of an episode, such as a player of a game, to which a branch belongs.

    Branches with their own reward form one side per branch name; all others are on side "".
    """
    return "" if branch.reward is None else branch.name


def is_counted(trajectory: Trajectory, algorithm: AlgorithmSection) -> bool:
    """Whether the episode counts in the loss and in its group's statistics.

    With `leave_out_truncated`, truncated episodes do not count. Source: overlong filtering of DAPO
    (arXiv:2503.14476, section 3.4).
    """
    return not (algorithm.leave_out_truncated and trajectory.status is Status.TRUNCATED)


def episode_sides(
    trajectories: Sequence[Trajectory], config: Config
) -> list[dict[str, RewardedEpisode]]:
    """Returns the sides of each episode by name, with the environment's rewards.

    The sides are in the order of their first branches. An episode without branches has one side; an
    episode that does not count (`is_counted`) has none.
    """
    limit = config.sampling.max_reply_tokens
    episodes: list[dict[str, RewardedEpisode]] = []
    for trajectory in trajectories:
        sides: dict[str, RewardedEpisode] = {}
        episodes.append(sides)
        if not is_counted(trajectory, config.algorithm):
            continue
        rewards = {side_of(branch): branch.reward for branch in trajectory.branches}
        for name, reward in (rewards or {"": None}).items():
            sides[name] = RewardedEpisode(
                reward=trajectory.reward if reward is None else reward,
                metrics=trajectory.metrics,
                is_truncated=trajectory.status is Status.TRUNCATED,
                reply_tokens=tuple(trajectory.run_lengths[1::2]),
                # The environment may have a lower limit.
                max_reply_tokens=min(limit, trajectory.max_reply_tokens or limit),
                environment=trajectory.environment,
                task_index=trajectory.task_index,
                side=name,
            )
    return episodes


def shaped_rewards(
    trajectories: Sequence[Trajectory], config: Config
) -> list[list[RewardedEpisode]]:
    """Returns the `episode_sides` of each episode, also with the rewards by `algorithm.reward`.

    Raises RunFailed if the reward function is faulty.
    """
    episodes = episode_sides(trajectories, config)
    # The episodes of each side of a group.
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, (trajectory, sides) in enumerate(zip(trajectories, episodes, strict=True)):
        for name in sides:
            groups[trajectory.group_id, name].append(index)
    for (group_id, name), members in groups.items():
        group = [episodes[index][name] for index in members]
        changed = rewarded(config.algorithm, group, where=f"group {group_id}")
        for index, episode in zip(members, changed, strict=True):
            episodes[index][name] = episode
    return [list(sides.values()) for sides in episodes]


def is_trained(trajectories: Sequence[Trajectory], config: Config) -> bool:
    """Whether `algorithm.filter` keeps the group of `trajectories`, which must not be empty.

    A filter is never called without an episode: it keeps no group in which none counts, unless it
    keeps all. Raises RunFailed if the reward function or the filter is faulty.
    """
    sides = shaped_rewards(trajectories, config)
    group = [side for episode in sides for side in episode]
    if not group:
        return config.algorithm.filter == "none"
    return filtered(config.algorithm, group, where=f"group {trajectories[0].group_id}")
