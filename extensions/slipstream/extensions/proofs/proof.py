"""Tests of a function's properties, called proofs: common parts, and those on a few episodes.

The latter prove advantage functions, reward functions and filters.
"""

import functools
import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from slipstream.core.errors import RunFailed
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.core.settings.function_table import FunctionKind
from slipstream.learner.algorithms.advantages import token_advantages
from slipstream.learner.algorithms.episodes import RewardedEpisode, ScoredEpisode, Turn
from slipstream.learner.algorithms.functions import Function, filtered, function_of, rewarded
from torch import Tensor

Scene = TypeVar("Scene")


def faults(function: Function, properties: Mapping[str, Callable[[], object]]) -> list[str]:
    """Returns one line for each of `properties` whose check raises RunFailed, with an example.

    If one of the first two fails, the others are not checked. If all hold, a change of the globals
    of the function's module is a fault.
    """
    lines = []
    name = str(function)
    before = _kept_by(function)
    with np.errstate(all="ignore"):
        for place, (title, check) in enumerate(properties.items()):
            try:
                check()
            except RunFailed as fault:
                lines.append(f"{name}: {title}: {str(fault).removeprefix(f'{name} at ')}")
                # The other checks say nothing if one of these two fails.
                if place < 2:
                    break
    changed = sorted(key for key, value in _kept_by(function).items() if value != before.get(key))
    if changed and not lines:
        lines.append(f"{name}: state: calls change {', '.join(changed)} of its module")
    return lines


def implementation(function: Function) -> Callable[..., object]:
    """Returns the Python function without the arguments of the configuration."""
    assert isinstance(function.call, functools.partial)
    unwrapped: Callable[..., object] = inspect.unwrap(function.call.func)
    return unwrapped


def check_state(scenes: Sequence[Scene], compute: Callable[[Scene], Mapping[str, Tensor]]) -> None:
    """Raises RunFailed if `compute` differs in later calls, or on the second of two ranks.

    Later calls have other random seeds. Between two calls with a scene there is one with another.
    """
    environ = dict.fromkeys(("RANK", "LOCAL_RANK"), "1") | {"WORLD_SIZE": "2"}
    ranks: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_rank": lambda *_: 1,
        "get_world_size": lambda *_: 2,
    }
    for place, scene in enumerate(scenes):
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            results.append(compute(scene))
            compute(scenes[place - 1])
        with mock.patch.dict(os.environ, environ), mock.patch.multiple(dist, **ranks):
            elsewhere = compute(scene)
        later = "in a later call with the same inputs and other random seeds"
        for moment, again in (
            *((later, result) for result in results[1:]),
            ("on the second of two ranks", elsewhere),
        ):
            if fault := difference(results[0], again, exactly=True):
                raise RunFailed(f"{fault}, {moment}: {scene}")


def difference(
    one: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    exactly: bool = False,
) -> str:
    """Describes the first value in which `other` differs from `one`, inside of `mask` if given.

    Returns "" if no value differs. Values may differ by rounding, unless `exactly` is set.
    """
    for name, values in one.items():
        compared = other.get(name)
        if compared is None or compared.shape != values.shape:
            return f"{name} is not there each time"
        is_same = torch.isclose(
            values,
            compared,
            rtol=1e-5,
            atol=1e-6,
            equal_nan=True,
        )
        if exactly:
            is_same = (values == compared) | (values.isnan() & compared.isnan())
        if mask is not None:
            is_same |= ~mask
        for place in torch.nonzero(~is_same)[:1, 0].tolist():
            return f"{name} {place} is {compared[place]:.9g}, not {values[place]:.9g}"
    return ""


def _kept_by(function: Function) -> dict[str, str]:
    """Returns the repr of whatever a function may change, by name, to detect changes.

    These are the globals of its module, and what the function and all functions of the module that
    it may call enclose, and the defaults of their arguments.
    """
    call = implementation(function)
    reprs: dict[str, str] = {}
    for name, value in call.__globals__.items():
        if not name.startswith("__"):
            is_own = getattr(value, "__module__", "") == call.__module__
            reprs[name] = repr((value, is_own and getattr(value, "__dict__", None)))
    open_functions: list[tuple[str, object]] = [("", call), *call.__globals__.items()]
    known: set[int] = set()
    while open_functions:
        name, value = open_functions.pop()
        if not isinstance(value, FunctionType) or value.__module__ != call.__module__:
            continue
        if id(value) in known:
            continue
        known.add(id(value))
        owner = f" of {name}" if name and value is not call else ""
        cells = value.__closure__ or ()
        for variable, cell in zip(value.__code__.co_freevars, cells, strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                # The variable has no value yet.
                content = None
            reprs[f"{variable} (enclosed{owner})"] = repr(content)
            open_functions.append((variable, content))
        defaults = dict(value.__kwdefaults__ or {})
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        positional = value.__defaults__ or ()
        defaults |= zip(names[len(names) - len(positional) :], positional, strict=True)
        for argument, default in defaults.items():
            reprs[f"{argument} (a default{owner})"] = repr(default)
    return reprs


class Rewards(tuple[tuple[float, ...], ...]):
    """The rewards of the episodes of each group of a scene."""

    def __str__(self) -> str:
        groups = (" ".join(f"{reward:g}" for reward in group) for group in self)
        return f"rewards {' and '.join(groups)}"


# Equal rewards: sums of the first are exact, those of the others are rounded. A bound of a filter,
# such as 0.1, is none of them: beside it every mean is decided by rounding.
ROUNDED = (0.125, 0.173, 0.346, 0.671)
# Rewards from 0 to 1.
PLAIN = (
    Rewards([(0.5,)]),
    Rewards([(0.0, 1.0)]),
    Rewards([(0.0, 1.0, 1.0), (1.0, 0.0)]),
    Rewards([(0.3, 0.7, 0.1, 0.9), (0.25,), (0.6, 0.4, 0.8)]),
)


# Rewards of episodes that also have token costs. A function may refuse these with a ValueError.
WIDE = (
    Rewards([(0.3, -0.2)]),
    Rewards([(1.0, 0.0, 2.5, -1.5), (-0.25,), (0.6, 0.4, 0.9)]),
)


# Rewards at which an estimator may divide by 0.
EQUAL = (
    Rewards([(0.0,)]),
    Rewards([(1.0, 1.0)]),
    Rewards([(1e-9, 0.0)]),
    Rewards([(0.1, 0.1, 0.1), (0.7, 0.7, 0.7)]),
)


# Rewards at the protocol's bounds. A function may refuse these with a ValueError.
LARGE = (Rewards([(1e6, -1e6), (1e6, 1e6)]),)


class AnyMetrics(Mapping[str, float]):
    """A mapping that gives any name a metric between 0 and 1, random but fixed by `seed`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __getitem__(self, name: str) -> float:
        return float(np.random.default_rng([self._seed, *name.encode()]).random())

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class EpisodeProof:
    """The proof of the advantage, reward or filter (by `kind`) of `algorithm`.

    `has_values` tells whether the test episodes have the estimates of a critic.
    """

    algorithm: AlgorithmSection
    kind: FunctionKind
    has_values: bool = False

    def faults(self) -> list[str]:
        """Returns one line for each required property that the function lacks."""
        properties: dict[str, Callable[[], object]] = {
            # Inputs are read-only, so a function that changes one in place raises an error here.
            "result": lambda: [*self._scenes()],
            "state": lambda: check_state([*self._scenes()], self.numbers),
            "order of episodes": self._check_order,
            "finite": self._check_finite,
        }
        if self.kind == "advantage":
            properties["names of groups"] = self._check_names
        if self.kind == "filter":
            properties["rounding"] = self._check_rounding
        return faults(function_of(self.algorithm, self.kind), properties)

    def _scenes(
        self, plain: Sequence[Rewards] = PLAIN, wide: Sequence[Rewards] = WIDE
    ) -> Iterator[Rewards]:
        """Yields the scenes that the function accepts.

        A reward function or filter gets each group as a separate scene. The function may refuse
        scenes of `wide` with a ValueError. Raises RunFailed if it refuses a scene of `plain`.
        """
        for groups in (*plain, *wide):
            alone = self.kind != "advantage"
            for scene in [Rewards([group]) for group in groups] if alone else [groups]:
                try:
                    self.numbers(scene)
                except RunFailed as fault:
                    if groups in plain or not isinstance(fault.__cause__, ValueError):
                        raise
                else:
                    yield scene

    def _episodes(self, scene: Rewards) -> list[Any]:
        chance = np.random.default_rng(len(scene))
        episodes: list[Any] = []
        for group, rewards in enumerate(scene):
            for member, reward in enumerate(rewards):
                size = 1 + (member + group) % 4
                metrics = AnyMetrics(len(episodes))
                if self.kind != "advantage":
                    lengths = (size, 16) if member % 2 else (3 * size,)
                    reply_fields = (bool(member % 2), lengths, 16, "environment", group)
                    episodes.append(RewardedEpisode(reward, metrics, *reply_fields))
                    if self.kind == "filter":
                        episodes[-1] = replace(episodes[-1], changed_reward=reward - size / 8)
                    continue
                values = chance.normal(0, 0.5, size) if self.has_values else None
                branches = (slice(0, 1), slice(1, size)) if size > 2 else (slice(0, size),)
                lags = chance.integers(0, 3, size, dtype=np.int32)
                costs = chance.uniform(0, 0.1, size) if scene in WIDE else np.zeros(size)
                shares = chance.dirichlet(np.ones(size)) if member % 2 else None
                token_rewards = None if shares is None else reward * shares
                turns = _turns(chance, size)
                token_fields = (costs, values, branches, metrics, lags, token_rewards, turns)
                episodes.append(ScoredEpisode(f"g{group}", reward, *token_fields))
        return episodes

    def numbers(self, scene: Rewards, episodes: Sequence[Any] | None = None) -> dict[str, Tensor]:
        """Returns the function's results on `episodes`, by default the scene's, by name.

        For a filter it is one number: 1 if the filter keeps the group, else 0.
        """
        where = str(scene)
        scored = self._episodes(scene) if episodes is None else episodes
        if self.kind == "filter":
            is_kept = filtered(self.algorithm, scored, where=where)
            return {"result": torch.tensor([float(is_kept)])}
        rows: list[list[float]] = []
        if self.kind == "reward":
            shaped = rewarded(self.algorithm, scored, where=where)
            rows = [[episode.shaped_reward, *episode.reports.values()] for episode in shaped]
        else:
            for episode in token_advantages(self.algorithm, scored, where=where):
                rows.append([*episode.advantages, *episode.reports.values()])
                rows[-1] += [] if episode.returns is None else [*episode.returns]
        return {
            f"episode {place}, number": torch.tensor(numbers, dtype=torch.float64)
            for place, numbers in enumerate(rows)
        }

    def _check_order(self) -> None:
        for scene in self._scenes():
            episodes = self._episodes(scene)
            before = self.numbers(scene)
            size = len(episodes)
            for order in (range(size - 1, -1, -1), [*range(1, size), 0]):
                after = self.numbers(scene, [episodes[place] for place in order])
                expected = [*before.values()]
                if self.kind != "filter":
                    expected = [expected[place] for place in order]
                if fault := difference(dict(zip(after, expected, strict=True)), after):
                    raise RunFailed(f"{fault} for the episodes {[*order]}: {scene}")

    def _check_names(self) -> None:
        for scene in self._scenes():
            renamed = [
                replace(episode, group_id=f"{9 - int(episode.group_id[1:])}-other")
                for episode in self._episodes(scene)
            ]
            if fault := difference(self.numbers(scene), self.numbers(scene, renamed)):
                raise RunFailed(f"{fault} for other group_ids: {scene}")

    def _check_rounding(self) -> None:
        """Raises RunFailed if the number of equal rewards decides, by rounding."""
        exact, *rounded = (self._kept_sizes(reward) for reward in ROUNDED)
        if len(set(exact.values())) > 1:
            # The filter looks at the number of episodes.
            return
        for reward, by_size in zip(ROUNDED[1:], rounded, strict=True):
            sizes = {is_kept: size for size, is_kept in by_size.items()}
            if len(sizes) > 1:
                raise RunFailed(
                    f"it keeps a group of {sizes[True]} rewards {reward:g} and leaves out one of "
                    f"{sizes[False]}: rounding decides, compare with a tolerance"
                )

    def _kept_sizes(self, reward: float) -> dict[int, bool]:
        """Returns whether groups of equal rewards are kept, by their size."""
        decisions: dict[int, bool] = {}
        for size in range(2, 9):
            group = Rewards([(reward,) * size])
            (result,) = self.numbers(group).values()
            decisions[size] = bool(result.item())
        return decisions

    def _check_finite(self) -> None:
        for scene in self._scenes(EQUAL, LARGE):
            for name, values in self.numbers(scene).items():
                if not values.isfinite().all():
                    raise RunFailed(f"{name} is {values.tolist()}: {scene}")


def _turns(chance: np.random.Generator, size: int) -> tuple[Turn, ...]:
    """Returns the turns of an episode of `size` tokens; some read what others have read."""
    cuts = [0, 1, 3, 4] if size > 3 else [*range(size + 1)]
    turns = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        read = chance.integers(0, 2, 1, dtype=np.uint32)
        reply = chance.integers(
            0,
            9,
            stop - start,
            dtype=np.uint32,
        )
        turns.append(Turn(slice(start, stop), read, reply))
    return tuple(turns)
