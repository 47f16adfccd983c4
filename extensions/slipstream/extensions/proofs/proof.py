"""Tests of a function's properties, called proofs: what those of all kinds of functions share."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from slipstream.core.errors import RunFailed
from slipstream.learner.algorithms.functions import Function
from torch import Tensor

Scene = TypeVar("Scene")


class Disproved(RunFailed):
    """Raised when a property does not hold; its text is an example that shows it."""


def faults(function: Function, properties: Mapping[str, Callable[[], None]]) -> list[str]:
    """Returns one line for each of `properties` whose check raises an error.

    If one of the first two fails, the others are not checked. If all hold, a change of the globals
    of the function's module is a fault. The random generators are restored afterwards.
    """
    found, name, before = [], str(function), _kept_by(function)
    state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), np.errstate(all="ignore"):
        for place, (title, check) in enumerate(properties.items()):
            try:
                check()
            except RunFailed as fault:
                found.append(f"{name}: {title}: {str(fault).removeprefix(f'{name} at ')}")
                # The other checks say nothing if one of these two fails.
                if place < 2:
                    break
    random.setstate(state)
    np.random.set_state(numpy_state)
    changed = sorted(key for key, value in _kept_by(function).items() if value != before.get(key))
    if changed and not found:
        found.append(f"{name}: state: calls change {', '.join(changed)} of its module")
    return found


def implementation(function: Function) -> Callable[..., object]:
    """Returns the Python function without the arguments of the configuration."""
    assert isinstance(function.call, functools.partial)
    found: Callable[..., object] = inspect.unwrap(function.call.func)
    return found


def check_state(scenes: Sequence[Scene], compute: Callable[[Scene], Mapping[str, Tensor]]) -> None:
    """Raises Disproved if `compute` differs in later calls, which have other random seeds.

    Between two calls with a scene there is one with another scene.
    """
    for place, scene in enumerate(scenes):
        results = []
        for seed in range(3):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            results.append(compute(scene))
            compute(scenes[place - 1])
        for again in results[1:]:
            if found := difference(results[0], again, exactly=True):
                raise Disproved(
                    f"{found}, in a later call with the same inputs and other random seeds: {scene}"
                )


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
    for name, mine in one.items():
        theirs = other.get(name)
        if theirs is None or theirs.shape != mine.shape:
            return f"{name} is not there each time"
        is_same = torch.isclose(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
        if exactly:
            is_same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        if mask is not None:
            is_same |= ~mask
        for place in torch.nonzero(~is_same)[:1, 0].tolist():
            return f"{name} {place} is {theirs[place]:.9g}, not {mine[place]:.9g}"
    return ""


def _kept_by(function: Function) -> dict[str, str]:
    """Returns the repr of each global of the function's module, by name, to detect changes."""
    call = implementation(function)
    kept = {}
    for name, value in call.__globals__.items():
        if not name.startswith("__"):
            is_own = getattr(value, "__module__", "") == call.__module__
            kept[name] = repr((value, is_own and getattr(value, "__dict__", None)))
    return kept
