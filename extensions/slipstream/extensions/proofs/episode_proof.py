"""Proofs of advantage functions, reward functions and filters on a few episodes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from slipstream.core.errors import RunFailed
from slipstream.core.settings.algorithm_functions import FunctionKind
from slipstream.core.settings.algorithm_section import AlgorithmSection
from slipstream.extensions.proofs.proof import Disproved, check_state, faults
from slipstream.learner.algorithms.episodes import (
    FloatArray,
    RewardedEpisode,
    ScoredEpisode,
    Turn,
)
from slipstream.learner.algorithms.functions import (
    filtered,
    function_of,
    rewarded,
    token_advantages,
)


class Rewards(tuple[tuple[float, ...], ...]):
    """The rewards of the episodes of each group of a scene."""

    def __str__(self) -> str:
        groups = (" ".join(f"{one:g}" for one in group) for group in self)
        return f"rewards {' and '.join(groups)}"


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
    *(Rewards([(0.0,)]), Rewards([(1.0, 1.0)]), Rewards([(1e-9, 0.0)])),
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
        properties: dict[str, Callable[[], None]] = {
            "result": self._check_result,
            "state": self._check_state,
            "inputs": self._check_inputs,
            "order of episodes": self._check_order,
            "finite": self._check_finite,
        }
        if self.kind == "advantage":
            properties["names of groups"] = self._check_names
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
                    self._numbers(scene)
                except RunFailed as fault:
                    if groups in plain or not isinstance(fault.__cause__, ValueError):
                        raise
                else:
                    yield scene

    def _episodes(self, scene: Rewards) -> list[Any]:
        chance = np.random.default_rng(len(scene))
        found: list[Any] = []
        for group, rewards in enumerate(scene):
            for member, reward in enumerate(rewards):
                size, metrics = 1 + (member + group) % 4, AnyMetrics(len(found))
                if self.kind != "advantage":
                    lengths = (size, 16) if member % 2 else (3 * size,)
                    of = (bool(member % 2), lengths, 16, "environment", group)
                    found.append(RewardedEpisode(reward, metrics, *of))
                    continue
                values = chance.normal(0, 0.5, size) if self.has_values else None
                branches = (slice(0, 1), slice(1, size)) if size > 2 else (slice(0, size),)
                lags = chance.integers(0, 3, size, dtype=np.int32)
                costs = chance.uniform(0, 0.1, size) if scene in WIDE else np.zeros(size)
                earned = reward * chance.dirichlet(np.ones(size)) if member % 2 else None
                given = (costs, values, branches, metrics, lags, earned, _turns(chance, size))
                found.append(ScoredEpisode(f"g{group}", reward, *given))
        return found

    def _numbers(self, scene: Rewards, episodes: Sequence[Any] | None = None) -> list[FloatArray]:
        """Returns the function's results on `episodes`, by default the scene's; an array for each.

        For a filter it returns one array: 1 if the filter keeps the group, else 0.
        """
        where, given = str(scene), self._episodes(scene) if episodes is None else episodes
        if self.kind == "filter":
            return [np.array(float(filtered(self.algorithm, given, where=where)))]
        if self.kind == "reward":
            shaped = rewarded(self.algorithm, given, where=where)
            return [np.array([e.reward, *e.reports.values()]) for e in shaped]
        numbers = []
        for each in token_advantages(self.algorithm, given, where=where):
            returns = np.zeros(0) if each.returns is None else each.returns
            numbers.append(np.concatenate([each.advantages, returns, [*each.reports.values()]]))
        return numbers

    def _check_result(self) -> None:
        for scene in self._scenes():
            self._numbers(scene)

    def _check_state(self) -> None:
        check_state([*self._scenes()], self._numbers, functools.partial(_difference, exactly=True))

    def _check_inputs(self) -> None:
        for scene in self._scenes():
            episodes = self._episodes(scene)
            self._numbers(scene, episodes)
            for one, other in zip(episodes, self._episodes(scene), strict=True):
                for name, value in vars(other).items():
                    if name != "metrics" and not _is_same(getattr(one, name), value):
                        raise Disproved(f"{name} of an episode is changed: {scene}")

    def _check_order(self) -> None:
        for scene in self._scenes():
            episodes, before = self._episodes(scene), self._numbers(scene)
            size = len(episodes)
            for order in (range(size - 1, -1, -1), [*range(1, size), 0]):
                after = self._numbers(scene, [episodes[place] for place in order])
                expected = before if self.kind == "filter" else [before[place] for place in order]
                if found := _difference(expected, after, f"for the episodes {[*order]}, "):
                    raise Disproved(f"{found}: {scene}")

    def _check_names(self) -> None:
        for scene in self._scenes():
            others = [
                replace(one, group_id=f"{9 - int(one.group_id[1:])}-other")
                for one in self._episodes(scene)
            ]
            after = self._numbers(scene, others)
            if found := _difference(self._numbers(scene), after, "for other group_ids, "):
                raise Disproved(f"{found}: {scene}")

    def _check_finite(self) -> None:
        for scene in self._scenes(EQUAL, LARGE):
            found = self._numbers(scene)
            if not all(np.isfinite(one).all() for one in found):
                raise Disproved(f"{_listed(found)}: {scene}")


def _turns(chance: np.random.Generator, size: int) -> tuple[Turn, ...]:
    """Returns the turns of an episode of `size` tokens; some read what others have read."""
    spans = (
        [slice(0, 1), slice(1, 3), slice(3, 4)]
        if size > 3
        else [slice(n, n + 1) for n in range(size)]
    )
    read = [chance.integers(0, 2, 1, dtype=np.uint32) for _ in spans]
    said = [chance.integers(0, 9, s.stop - s.start, dtype=np.uint32) for s in spans]
    return tuple(itertools.starmap(Turn, zip(spans, read, said, strict=True)))


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Turn) and isinstance(other, Turn):
        return all(map(_is_same, vars(one).values(), vars(other).values()))
    return np.array_equal(one, other)  # type: ignore[arg-type]


def _difference(
    one: Sequence[FloatArray], other: Sequence[FloatArray], told: str = "", *, exactly: bool = False
) -> str:
    """Returns "" if two results are equal up to rounding, or `exactly`; else first numbers."""
    close = functools.partial(np.allclose, rtol=1e-6, atol=1e-9)
    is_same = np.array_equal if exactly else close
    if all(
        a.shape == b.shape and is_same(a, b, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    ):
        return ""
    return f"{_listed(other)} {told}not {_listed(one)}"


def _listed(numbers: Sequence[FloatArray]) -> str:
    return " ".join(f"{float(one.flat[0]):.9g}" for one in numbers[:4])
