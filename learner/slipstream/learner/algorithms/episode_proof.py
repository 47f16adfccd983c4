"""Property tests of advantage functions, reward functions and filters on a few episodes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from slipstream.core.errors import RunFailed
from slipstream.core.settings.algorithm_functions import FunctionKind
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.learner.algorithms.episodes import FloatArray, RewardedEpisode, ScoredEpisode
from slipstream.learner.algorithms.functions import (
    filtered,
    function_of,
    rewarded,
    token_advantages,
)
from slipstream.learner.algorithms.proof import faults, reseed
from slipstream.learner.algorithms.proof_scenes import Disproved

# Rewards of the episodes of each group, from 0 to 1.
PLAIN = (
    ((0.5,),),
    ((0.0, 1.0),),
    ((0.0, 1.0, 1.0), (1.0, 0.0)),
    ((0.3, 0.7, 0.1, 0.9), (0.25,), (0.6, 0.4, 0.8)),
)
# Rewards of episodes that also have token costs. A function may refuse these with a ValueError.
WIDE = (((0.3, -0.2),), ((1.0, 0.0, 2.5, -1.5), (-0.25,), (0.6, 0.4, 0.9)))
# Rewards at which an estimator may divide by 0.
EQUAL = (((0.0,),), ((1.0, 1.0),), ((0.1, 0.1, 0.1), (0.7, 0.7, 0.7)), ((1e-9, 0.0),))
# Rewards at the protocol's bounds. A function may refuse these with a ValueError.
LARGE = (((1e6, -1e6), (1e6, 1e6)),)
Groups: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class ProvedEpisodes:
    """The function under test: the advantage, reward or filter (by `kind`) of `algorithm`.

    `has_values` tells whether the test episodes have the estimates of a critic.
    """

    algorithm: AlgorithmSection
    kind: FunctionKind
    has_values: bool = False


def episode_faults(proved: ProvedEpisodes) -> list[str]:
    """Returns one line for each required property that the function under test lacks."""
    properties: dict[str, Callable[[ProvedEpisodes], None]] = {
        "result": _check_result,
        "state": _check_state,
        "inputs": _check_inputs,
        "order of episodes": _check_order,
        "finite": _check_finite,
    }
    if proved.kind == "advantage":
        properties["names of groups"] = _check_names
    return faults(function_of(proved.algorithm, proved.kind), proved, properties)


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


def _episodes(proved: ProvedEpisodes, groups: Groups) -> list[Any]:
    chance = np.random.default_rng(len(groups))
    found: list[Any] = []
    for group, rewards in enumerate(groups):
        for member, reward in enumerate(rewards):
            size, metrics = 1 + (member + group) % 4, AnyMetrics(len(found))
            if proved.kind != "advantage":
                lengths = (size, 16) if member % 2 else (3 * size,)
                found.append(
                    RewardedEpisode(
                        *(reward, metrics, bool(member % 2), lengths, 16, "environment", group)
                    )
                )
                continue
            values = chance.normal(0, 0.5, size) if proved.has_values else None
            branches = (slice(0, 1), slice(1, size)) if size > 2 else (slice(0, size),)
            costs, lags = np.zeros(size), chance.integers(0, 3, size, dtype=np.int32)
            if groups in WIDE:
                costs = chance.uniform(0, 0.1, size)
            found.append(ScoredEpisode(f"g{group}", reward, costs, values, branches, metrics, lags))
    return found


def _numbers(proved: ProvedEpisodes, episodes: Sequence[Any], groups: Groups) -> list[FloatArray]:
    """Returns the function's results on `episodes`, one array per episode.

    For a filter it returns one array: 1 if the filter keeps the group, else 0.
    """
    where = _shown(groups)
    if proved.kind == "filter":
        return [np.array(float(filtered(proved.algorithm, episodes, where=where)))]
    if proved.kind == "reward":
        shaped = rewarded(proved.algorithm, episodes, where=where)
        return [np.array([e.reward, *e.reports.values()]) for e in shaped]
    numbers = []
    for each in token_advantages(proved.algorithm, episodes, where=where):
        returns = np.zeros(0) if each.returns is None else each.returns
        numbers.append(np.concatenate([each.advantages, returns, [*each.reports.values()]]))
    return numbers


def _check_result(proved: ProvedEpisodes) -> None:
    for groups in _scenes(proved):
        _numbers(proved, _episodes(proved, groups), groups)


def _check_inputs(proved: ProvedEpisodes) -> None:
    for groups in _scenes(proved):
        episodes, untouched = _episodes(proved, groups), _episodes(proved, groups)
        _numbers(proved, episodes, groups)
        for one, other in zip(episodes, untouched, strict=True):
            for name, value in vars(other).items():
                if name != "metrics" and not np.array_equal(getattr(one, name), value):
                    raise Disproved(f"{name} of an episode is changed: {_shown(groups)}")


def _check_state(proved: ProvedEpisodes) -> None:
    other = PLAIN[1]
    for groups in _scenes(proved):
        results = []
        for seed in range(3):
            reseed(seed)
            results.append(_numbers(proved, _episodes(proved, groups), groups))
            _numbers(proved, _episodes(proved, other), other)
        for again in results[1:]:
            same = functools.partial(np.array_equal, equal_nan=True)
            if not all(map(same, results[0], again)):
                raise Disproved(
                    f"{_listed(results[0])}, and {_listed(again)} in a later call with the same "
                    f"inputs and other random seeds: {_shown(groups)}"
                )


def _check_order(proved: ProvedEpisodes) -> None:
    for groups in _scenes(proved):
        episodes = _episodes(proved, groups)
        before = _numbers(proved, episodes, groups)
        size = len(episodes)
        for order in (range(size - 1, -1, -1), [*range(1, size), 0]):
            after = _numbers(proved, [episodes[place] for place in order], groups)
            expected = before if proved.kind == "filter" else [before[place] for place in order]
            if not _close(expected, after):
                raise Disproved(
                    f"{_listed(after)} for the episodes {[*order]}, not {_listed(expected)}: "
                    f"{_shown(groups)}"
                )


def _check_names(proved: ProvedEpisodes) -> None:
    for groups in _scenes(proved):
        episodes = _episodes(proved, groups)
        others = [
            dataclasses.replace(e, group_id=f"{9 - int(e.group_id[1:])}-other") for e in episodes
        ]
        before, after = _numbers(proved, episodes, groups), _numbers(proved, others, groups)
        if not _close(before, after):
            raise Disproved(
                f"{_listed(after)} for other group_ids, not {_listed(before)}: {_shown(groups)}"
            )


def _check_finite(proved: ProvedEpisodes) -> None:
    for groups in _scenes(proved, EQUAL, LARGE):
        found = _numbers(proved, _episodes(proved, groups), groups)
        if not all(np.isfinite(one).all() for one in found):
            raise Disproved(f"{_listed(found)}: {_shown(groups)}")


def _scenes(
    proved: ProvedEpisodes, plain: Sequence[Groups] = PLAIN, wide: Sequence[Groups] = WIDE
) -> Iterator[Groups]:
    """Yields the scenes that the function accepts; a scene has the rewards of a few test groups.

    A reward function or filter gets each group as a separate scene. The function may refuse scenes
    of `wide` with a ValueError. Raises RunFailed if it refuses a scene of `plain`.
    """
    for groups in (*plain, *wide):
        for scene in [groups] if proved.kind == "advantage" else [(group,) for group in groups]:
            try:
                _numbers(proved, _episodes(proved, scene), scene)
            except RunFailed as fault:
                if groups in plain or not isinstance(fault.__cause__, ValueError):
                    raise
            else:
                yield scene


def _close(one: Sequence[FloatArray], other: Sequence[FloatArray]) -> bool:
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _listed(numbers: Sequence[FloatArray]) -> str:
    return " ".join(f"{float(one.flat[0]):.9g}" for one in numbers[:4])


def _shown(groups: Groups) -> str:
    return "rewards " + " and ".join(" ".join(f"{one:g}" for one in group) for group in groups)
